"""A bus under steady load for half an hour: ``python -m lab.soak``, or ``make soak``.

`plugin`, `calls` and `visits` are the programs round the bus, `run` samples it meanwhile, `verdict` judges what was
sampled, `picture` and `page` show it.
"""
