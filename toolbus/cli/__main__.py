"""``python -m toolbus.cli``, for where the script is not installed."""

from toolbus.cli import main

main()
