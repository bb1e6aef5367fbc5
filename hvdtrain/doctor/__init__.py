"""Checks whether this machine, and other hosts, can train. Each check has a time limit and, if it fails, a fix.

`checks` holds what all share. The other modules, in the order in which their `checks(options)` are shown:

`software`        versions of Python, TensorFlow, Keras, Horovod;
`machine`         shared memory, folders, limits, threads, the machine's name;
`services`        Slurm, Docker, Podman;
`horovod_checks`  Horovod's library, GPUs, an allreduce;
`remote_hosts`    other hosts; `host_probe` is the program that their Python reads from standard input.
"""
