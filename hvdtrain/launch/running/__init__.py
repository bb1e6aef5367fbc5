"""Monitoring a launch while it runs: its processes, their output, and why it ended."""
