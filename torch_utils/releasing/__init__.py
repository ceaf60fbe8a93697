"""release(): understand, count, take out, verify.

`plan` finds out what to do with each object, `storages` counts the memory first, then each target
(`modules`, `tensors`, `optimizers`, `faiss_indexes`) gives its memory up, and `run` reports what is
gone. `objects` is the only place that reads foreign objects.
"""
