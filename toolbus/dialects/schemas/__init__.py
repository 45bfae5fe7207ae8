"""JSON Schemas as providers accept them."""
