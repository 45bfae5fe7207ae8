"""Counts what a bus does, and writes the counts as Prometheus reads them; knows neither entries nor calls."""
