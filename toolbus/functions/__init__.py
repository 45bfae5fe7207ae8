"""A Python function as a tool: declared, described, run."""
