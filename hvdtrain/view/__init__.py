"""The live view of a run: its state, drawn from rank 0's events in the last rows of a terminal."""
