"""Knows who is asking: identities, and the scopes that say what each may do."""
