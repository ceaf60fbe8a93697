"""A model in a FastAPI service. In this folder: uvicorn fastapi_service:app"""

import asyncio

from fastapi import FastAPI, Request

from rag_demo import EmbeddingModel
from torch_utils import ModelHost
from torch_utils.fastapi import lifespan
from torch_utils.prometheus import asgi_app


def load_model():
    model = EmbeddingModel()
    model.load_model()
    return model


@lifespan(deadline_s=20)
async def models(app, scope):
    yield {"host": scope.manage(ModelHost(load_model, keep_alive="10m"))}


app = FastAPI(lifespan=models)
app.mount("/metrics", asgi_app())


@app.post("/embed")
async def embed(texts: list[str], request: Request) -> list[list[float]]:
    async with request.state.host.alease(timeout_s=60) as model:  # loads it on first use
        return (await asyncio.to_thread(model.embed_documents, texts)).tolist()
