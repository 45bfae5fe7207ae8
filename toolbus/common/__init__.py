"""Holds what every folder uses and none owns: texts, caches, bounded queues, readers of settings, the version."""
