"""The parts of toolbus that a bus runs without: each is one folder with everything of it, and goes with its folder."""
