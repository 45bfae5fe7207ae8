"""What sources declared when they were trusted: fingerprints, and their approval."""
