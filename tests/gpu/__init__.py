"""What is promised on a GPU. Each test runs on one, and is rehearsed in host memory.

The tests need neither pytest nor its fixtures: what they skip they skip with `unittest.SkipTest`,
so that `run.py` can run them where there is no pytest.
"""
