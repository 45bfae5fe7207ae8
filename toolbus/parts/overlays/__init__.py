"""Overlays: the operator's word over how a tool is offered."""
