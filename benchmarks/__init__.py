"""Benchmarks: `python -m benchmarks.NAME`; each writes its raw result into `results/`."""
