"""A model in a FastAPI service. In this folder: uvicorn fastapi_service:app"""

from fastapi import FastAPI, Request
from model import load_model

from torch_utils import ModelHost
from torch_utils.fastapi import lifespan
from torch_utils.prometheus import asgi_app


@lifespan(deadline_s=20)
async def models(app, scope):
    yield {"host": scope.manage(ModelHost(load_model, keep_alive="10m"))}  # loads nothing yet


app = FastAPI(lifespan=models)
app.mount("/metrics", asgi_app())


@app.post("/rate")
async def rate(texts: list[str], request: Request) -> list[float]:
    return await request.state.host.call(  # loads the model on first use
        lambda model: [model.friendliness(text) for text in texts], timeout_s=60
    )
