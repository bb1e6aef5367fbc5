"""Slurm: reading an allocation, the variables of srun's tasks, and submitting batch jobs."""
