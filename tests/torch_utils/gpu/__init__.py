"""Tests of what the library promises on a GPU. Each is also rehearsed in host memory."""
