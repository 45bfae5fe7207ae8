"""What a bus tells other programs of itself: metrics for Prometheus, spans for a collector of OpenTelemetry."""
