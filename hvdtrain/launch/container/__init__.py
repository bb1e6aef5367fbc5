"""Launching in a container: building the command, and querying the engine that runs it."""
