"""Searches toolbus for inputs that break a promise: each target has its own oracle. See lab/README.md."""
