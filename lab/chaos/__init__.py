"""A bus among programs that die, hang and lose their connections: ``python -m lab.chaos``, or ``make chaos``.

`cast` says who takes part, `schedule` what happens to whom and when, `run` lets it happen, `checks` judges what
everybody wrote down meanwhile.
"""
