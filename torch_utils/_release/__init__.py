"""release(): empty what is passed, and let reference counts decide about the rest.

`run` has the steps. `roots` decides what may be passed, `graph` which of the objects in it go,
`emptying` empties, `storages` counts the memory, and `holders` finds what holds the rest. Only
`objects` reads foreign objects.
"""
