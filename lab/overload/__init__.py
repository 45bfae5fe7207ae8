"""Offers ten times as much as a bus can take: what is accepted, what is refused, and what others notice of it.

``python -m lab.overload`` plays each part against a real bus and judges what its hosts, plugins and probes saw.
"""
