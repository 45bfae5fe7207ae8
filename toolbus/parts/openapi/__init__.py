"""The operations of an OpenAPI document as tools: read, chosen, named, requested."""
