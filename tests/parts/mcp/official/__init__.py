"""Tests of what reads and writes the Model Context Protocol."""
