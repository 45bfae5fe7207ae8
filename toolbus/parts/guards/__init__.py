"""Checks calls: guards (tools) refuse or change them before and after they run, and people approve them."""
