"""Peers on gRPC streams."""
