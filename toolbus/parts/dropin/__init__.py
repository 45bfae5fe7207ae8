"""Drop-in tools: a folder of files, each with one or more tools, run in sandboxed processes."""
