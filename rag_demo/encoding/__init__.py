"""Encoders: loaded models that turn texts into vectors."""
