"""Shows what a bus does, live: the state read from its digests, as text, as JSON and as a screen (Textual)."""
