"""Converts JSON Schemas into the part of JSON Schema that each provider accepts.

`schema_rules` is the entrance: `convert`, and one `SchemaRules` for each provider. What rewrites: `json_subset` for
Gemini (`rewrite` for its older form) and grammars, `sanitizer` for OpenAI and Anthropic, `strict` for OpenAI's strict
mode, `merged` for Ollama.
"""
