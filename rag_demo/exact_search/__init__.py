"""Exact search by a scan of rounded vectors with a proven bound."""
