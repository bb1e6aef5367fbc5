"""Launches in a container: the command, and the engine that runs it."""
