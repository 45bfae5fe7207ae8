"""Measures whether what a dialect sends still says enough for a model to form the right call."""
