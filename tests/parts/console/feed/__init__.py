"""Tests of what operators look at."""
