"""The saved index: a folder with a SQLite database and two files of vectors."""
