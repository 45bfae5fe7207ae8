"""Measures and stresses a bus: benchmarks, chaos, fuzz, overload, soak."""
