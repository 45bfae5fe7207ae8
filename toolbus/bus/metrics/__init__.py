"""Counts calls, and writes metrics as Prometheus reads them; knows neither entries nor calls."""
