"""What is indexed: documents, their passages, and the rows of vectors that stand for them."""
