"""Offers the bus's own tools to operators, and stores the permissions that they grant and deny at run time."""
