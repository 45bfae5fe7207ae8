"""Has each kind of peer do its worst beside an honest host: ``python -m lab.hostile``, or ``make hostile``.

`attackers` and `offering_peer` are the hostile programs, `honest` calls beside them, `watched_bus` is the bus with a
clock in its loop, `run` plays one kind at a time and judges it.
"""
