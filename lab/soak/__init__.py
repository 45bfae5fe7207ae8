"""Keeps a bus under steady load for half an hour: ``python -m lab.soak``, or ``make soak``.

`plugin`, `calls` and `visits` are the programs round the bus, `run` samples it meanwhile, `verdict` judges the samples,
`page` shows them.
"""
