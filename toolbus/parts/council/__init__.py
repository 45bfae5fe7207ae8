"""Councils of role-play hosts: members that run tools before the model answers."""
