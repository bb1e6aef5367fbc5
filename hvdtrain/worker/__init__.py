"""Prepare a process as a worker of a job, before TensorFlow is loaded: `python -m hvdtrain.worker SCRIPT`."""
