"""Reads the schemas that are written in Python code, as the bus will read them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from toolbus.parts.moving.check.source_file import Effect, Finding, SourceFile
from toolbus.protocol.json_schema import SchemaFault, normal_form

_KEYS = ("parameters", "TOOL_PARAMETERS")
_REMEDY = "Correct the schema: until then the other tools are offered, and this one is not."


def schemas(source: SourceFile) -> Iterator[Finding]:
    """Yields what the bus refuses, or reads otherwise than it is written; leaves out schemas that are computed."""
    for node in ast.walk(source.tree):
        for key, value in _named_values(node):
            if key not in _KEYS or not isinstance(value, ast.Dict):
                continue
            try:
                form = normal_form(ast.literal_eval(value))
            except SchemaFault as fault:
                yield source.finding(value, Effect.STOPS, f"the bus refuses the tool: {fault}", _REMEDY)
            except (ValueError, TypeError, AttributeError):
                continue
            else:
                for warning in form.warnings:
                    yield source.finding(value, Effect.NOTE, warning)


def _named_values(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yields what a node gives a name: a keyword, a variable or a key of a dictionary."""
    match node:
        case ast.keyword(arg=str(name), value=value):
            yield name, value
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case ast.Dict(keys=keys, values=values):
            for each, value in zip(keys, values, strict=True):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    yield each.value, value
