"""release(): plan, count, release and verify.

`plan` decides what to do with each object, and `storages` counts its memory. Then each of the
`targets` releases its memory, and `run` reports what was freed. Only `objects` reads foreign
objects.
"""
