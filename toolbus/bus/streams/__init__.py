"""Serves peers on gRPC streams: plugins that offer tools, and hosts that call them."""
