"""Hosts and plugins that load a bus: raw peers and SDK programs, call windows, schedules, a TCP line that can fail."""
