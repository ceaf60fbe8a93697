"""Kills, interrupts, full disks and damage while an index is saved or built.

Frozen acceptance material: it uses public names only, and treats an index folder as files of
unknown names and content. Do not change it to make a change of the product pass.
"""
