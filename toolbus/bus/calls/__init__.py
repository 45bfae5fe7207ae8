"""Takes a call from its admission to its result: dispatch, refusals, early ends, records, traces."""
