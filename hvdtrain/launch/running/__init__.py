"""A launch while it runs: its processes, their output, their end and the reason of it."""
