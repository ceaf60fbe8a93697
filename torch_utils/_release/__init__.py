"""release(): empty what is passed, and let reference counts decide about the rest.

`run` has the steps. `counting` says what is emptied and counts its memory by weak references,
`tombstones` empties it, and `holders` finds what refers to the rest. Only `objects` reads foreign
objects.
"""
