"""Records who changed what on the bus: a chain of lines in files that only grow."""
