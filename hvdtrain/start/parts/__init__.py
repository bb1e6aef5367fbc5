"""The programs that a launch consists of are made of these; none of them is run by itself."""
