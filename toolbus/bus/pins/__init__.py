"""Notices that a source declares other tools than those that were trusted: fingerprints, and where they are stored."""
