"""What runs: launches on this machine, Slurm jobs and containers that hvdtrain started."""
