"""Acceptance material: what the packages must do, however they are built. See README.md."""
