"""Lets web pages of origins that the operator names be hosts over HTTP."""
