"""Loads a bus: raw peers and SDK programs as hosts and plugins, call windows, schedules, a TCP line that can fail."""
