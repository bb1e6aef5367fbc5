"""Can this machine, and can these hosts, train? Real checks, each with a time limit and, where red, the fix.

`checks` has what all share. The others, each with its `checks(options)`, in the order in which they are shown:

`software`      versions of Python, TensorFlow, Keras, Horovod;
`machine`       shared memory, folders, limits, threads, the machine's name;
`services`      Slurm, Docker, Podman;
`horovod`       Horovod's library, GPUs, an allreduce;
`hosts`         other hosts, of which `host_probe` is asked: a text on their Python's standard input.
"""
