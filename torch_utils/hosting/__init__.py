"""Models that come and go: hosts that lend them, and a model in a process of its own."""
