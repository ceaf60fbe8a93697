"""``python -m rag_demo``."""

from rag_demo.cli import main

if __name__ == "__main__":
    main()
