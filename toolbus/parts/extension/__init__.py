"""Offers the tools of extensions of role-play hosts, through their API; a plugin of the SDK."""
