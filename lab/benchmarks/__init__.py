"""Measures the bus beside the limit of its own stack and beside a rival: ``python -m lab.benchmarks``.

Nothing here is shipped, and nothing in ``toolbus`` imports it.
"""
