"""Who did what to the bus: a chain of lines in files, in which later changes show."""
