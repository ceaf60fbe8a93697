"""Exact search: every row that may be among the best, by `rag_demo.exact_search.candidates`."""
