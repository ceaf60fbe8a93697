"""Documents and passages, and the readers of files."""
