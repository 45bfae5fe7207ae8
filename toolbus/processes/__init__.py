"""Supervises plugins as processes: restarts, graceful shutdown, output; no process outlives the supervisor."""
