"""The service: searches an index over HTTP. Needs the extra ``service``.

The models and the index live in hosts (`torch_utils.ModelHost`). A lifespan with a scope
(`torch_utils.fastapi.lifespan`) closes the hosts when the server stops.
"""
