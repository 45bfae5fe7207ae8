"""Converts JSON Schemas into the part of JSON Schema that each provider accepts."""
