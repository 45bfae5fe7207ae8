"""Exports spans of calls to a collector of OpenTelemetry."""
