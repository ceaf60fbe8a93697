"""Tests of what the library promises on a GPU. Each is also rehearsed in host memory.

The tests need neither pytest nor its fixtures. They skip by `unittest.SkipTest`, so that `run.py`
can run them without pytest.
"""
