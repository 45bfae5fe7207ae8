"""Proves clients and buses: the rules of the protocol as data, and a program that plays them."""
