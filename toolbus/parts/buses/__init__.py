"""Connects plugins and hosts to several buses: a plugin to each of them, a host to one after the other."""
