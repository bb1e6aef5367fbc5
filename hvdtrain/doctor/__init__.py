"""Can this machine, and can these hosts, train? Real checks, each with a time limit and, where red, the fix.

`checks`        a check and its results; runs them beside each other, each within its time;
`report`        results as lines for a person, or as JSON.

What is checked, each file with its `checks(options)`, in the order in which they are shown:

`software`      versions of Python, TensorFlow, Keras, Horovod;
`machine`       shared memory, folders, limits, threads, the machine's name;
`services`      Slurm, Docker, Podman;
`horovod`       Horovod's library, GPUs, an allreduce;
`hosts`         other hosts.

What needs TensorFlow or NCCL runs in a process of its own (`engine_probe`); what is asked of another host runs there,
as a text on its Python's standard input (`host_probe`).
"""
