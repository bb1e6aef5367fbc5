"""A run as it is seen while it trains: rank 0's events, drawn in the last rows of a terminal."""
