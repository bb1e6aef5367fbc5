"""Checks whether this machine, and other hosts, can train. Each check has a time limit and, if it fails, a fix.

`checks` has what all share. The others, each with its `checks(options)`, in the order in which they are shown:

`software`      versions of Python, TensorFlow, Keras, Horovod;
`machine`       shared memory, folders, limits, threads, the machine's name;
`services`      Slurm, Docker, Podman;
`horovod`       Horovod's library, GPUs, an allreduce;
`hosts`         other hosts, of which `host_probe` is asked: a text on their Python's standard input.
"""
