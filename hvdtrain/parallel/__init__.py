"""Models and optimizer states that are divided over the ranks, by Horovod's process sets."""
