"""Slurm: what an allocation offers, the srun that starts ranks in it, and the job that asks for
one."""
