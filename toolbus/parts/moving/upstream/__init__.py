"""Offers the tools of the bus to another host's main server, by its own REST contract."""
