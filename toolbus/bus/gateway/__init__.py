"""Serves plugins, hosts, operators and health probes over HTTP."""
