"""What operators look at: the digest of a bus, the page that shows it, and who may."""
