"""A small network writes a line of the Zen of Python to its end: rows that run in steps. Trained at load."""
