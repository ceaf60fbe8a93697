"""Exact search: one pass over rounded vectors, a proven bound, and float64 for the candidates."""
