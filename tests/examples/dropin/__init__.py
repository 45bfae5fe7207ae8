"""The tools of examples/dropin, each file loaded by hand: what loads them for the bus has its own tests."""
