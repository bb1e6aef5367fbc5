"""A page about one run or several, drawn from what their folders hold; what a timeline of Horovod's tells."""
