"""Reads and writes the Model Context Protocol: its messages and objects, without any input or output."""
