"""Checkpoints: the state of a training in folders that are complete or absent, and how often they are written."""
