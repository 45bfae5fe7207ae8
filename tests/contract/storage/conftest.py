"""Runs a Postgres server for the drivers of shared databases."""

from tests.support.postgres import postgres

__all__ = ["postgres"]
