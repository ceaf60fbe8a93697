"""Kills, interrupts, full disks and damage while an index is saved or built.

They use public names only, and treat an index folder as files of unknown names and content.
"""
