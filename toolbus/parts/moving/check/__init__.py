"""Reads code that was written for another system, without running it, and finds what differs on the bus."""
