"""The service: questions to an index over HTTP, made of what ``torch_utils`` gives to everyone.

The model and the index live in hosts (`torch_utils.ModelHost`), which a lifespan with a scope
(`torch_utils.fastapi.lifespan`) closes when the server stops, and whose loads and unloads
`torch_utils.prometheus` counts. Needs the extra ``service``.
"""
