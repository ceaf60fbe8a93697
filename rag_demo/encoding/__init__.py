"""How a model computes: one `Encoder` for each way, and what makes them fast."""
