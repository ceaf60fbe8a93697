"""Search against a float64 reference: exact answers, filters and words."""
