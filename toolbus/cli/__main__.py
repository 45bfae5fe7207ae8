"""Runs ``python -m toolbus.cli``, where the script is not installed."""

from toolbus.cli import main

main()
