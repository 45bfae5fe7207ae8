"""Legacy plugins and probes, over HTTP."""
