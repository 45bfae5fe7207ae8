"""Knows which key proves which identity: tokens and certificates, their file, the authority that issues them."""
