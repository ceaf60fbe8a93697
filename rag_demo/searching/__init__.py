"""How the best are found: scans of vectors, words, filters, and the order of the answers."""
