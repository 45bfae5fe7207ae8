"""What makes identities: the certificate authority and the keys of a bus, and tokens of other issuers."""
