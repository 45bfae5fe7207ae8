"""Supervises plugins as processes: restarts, graceful shutdown, output. No process outlives its supervisor."""
