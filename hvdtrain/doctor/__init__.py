"""Is this machine, and are these hosts, able to train? Real probes, each with a time limit and, where red, the fix.

`finding`      what a probe found: one line and its fix;
`examination`  runs probes beside each other, each within its time;
`checklist`    which probes there are, in the order in which they are shown;
`report`       findings as lines for a person, or as JSON.

The probes: `versions`, `backend`, `memory`, `threads`, `slurm`, `containers`, `gpus`, `engine`, `allreduce`, `hosts`.
Whatever needs TensorFlow runs in a process of its own (`engine_report`, `nccl_report`; `host_report` on another host).
"""
