"""Hosts that load, lend and unload models, in this process or in one of their own."""
