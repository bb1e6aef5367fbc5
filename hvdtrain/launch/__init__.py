"""The launch wing: from what the user asks to a running job. Imports neither TensorFlow nor
Horovod."""
