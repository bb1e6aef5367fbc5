"""What makes a process a worker of a job, before TensorFlow is loaded: `python -m hvdtrain.worker SCRIPT`."""
