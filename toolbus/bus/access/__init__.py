"""Declares identities and their scopes, and decides which users of this machine may connect."""
