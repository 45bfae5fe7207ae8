"""Exports what the bus tells of calls to a collector of OpenTelemetry."""
