"""Runs short JavaScript programs that call other tools, for loops and filters over many results."""

from toolbus.dropin import run_script as run_script
