"""The bus's own tools for operators."""
