"""Measurements of scaling, input, start-up, memory, pipeline and checkpoints on the present machine."""
