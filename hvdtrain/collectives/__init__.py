"""Communication between ranks, through Horovod: communicators, gradient reduction, replica checks and metrics."""
