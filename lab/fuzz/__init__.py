"""Inputs found by coverage, against toolbus: every target has an oracle of its own. See docs/about/testing.md."""
