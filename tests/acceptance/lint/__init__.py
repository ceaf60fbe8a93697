"""Frozen: programs with destructors, and what the linter has to say about each line of them."""
