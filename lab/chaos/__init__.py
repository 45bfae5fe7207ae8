"""Lets a bus live among programs that die, hang and lose their connections: ``python -m lab.chaos``, ``make chaos``.

`cast` lists who takes part, `schedule` what happens to whom and when, `run` plays it, `checks` judges the
ledgers that all of them wrote.
"""
