"""Lets several buses share settings and results of tasks, in a Postgres database."""
