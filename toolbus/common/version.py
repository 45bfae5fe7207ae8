"""Says which version of toolbus this is."""

VERSION = "0.1.0"
