"""Ordinary programs with the real libraries, checked without the product's own reports."""
