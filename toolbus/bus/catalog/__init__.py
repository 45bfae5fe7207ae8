"""The catalog: what is offered, by whom, for which role, and who may see it."""
