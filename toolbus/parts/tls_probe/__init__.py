"""Finds out why a peer cannot talk to a bus, where gRPC only says that a socket was closed."""
