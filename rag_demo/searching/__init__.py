"""Searches: contents, candidates, full text, filters, and the order of the answers."""
