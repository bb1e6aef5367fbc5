"""A running launch: its processes, their output, and why it ended."""
