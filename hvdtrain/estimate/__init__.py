"""Estimates the memory of each rank and its traffic in a step, before a training runs."""
