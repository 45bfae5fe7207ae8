"""N.E.K.O. plugins: their classes, what those find in themselves, and their folders; no connection, no bus."""
