"""release(): empty what is passed, and let reference counts decide about the rest.

`run` has the steps, `counting` counts the memory by weak references and finds what still holds it,
and only `objects` reads and empties foreign objects.
"""
