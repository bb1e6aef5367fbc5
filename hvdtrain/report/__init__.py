"""A page about one run or several, drawn from what their folders hold."""
