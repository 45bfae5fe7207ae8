"""Blocks results and notifications of untrusted sources that have a field named like a secret."""
