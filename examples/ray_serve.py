"""A model behind Ray Serve: several replicas, one history, and each user at the replica that has theirs in memory.

    pip install 'hierspec[redis]' 'ray[serve]>=2.60'
    redis-server --appendonly yes &
    HIERSPEC_HISTORY=redis://127.0.0.1:6379/0 serve run examples.ray_serve:application

    curl http://127.0.0.1:8000/ -H "x-session-id: anna" -d '{"prompt": "Why is the sky blue?", "max_tokens": 64}'

A user's requests go to one replica by consistent hashing, and to the next one on the ring when it is gone. There the
user's history is fetched from Redis when their first request begins. Where a replica dies, the front asks again: an
answer is the same wherever it is written, because its seed is chosen by the front.
"""

from __future__ import annotations

import asyncio
import os
import random
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse

import hierspec

REPLICAS = 2
MODEL = os.environ.get("HIERSPEC_MODEL")  # a folder, a GGUF file or a hub name; default: the default model
HISTORY = os.environ.get("HIERSPEC_HISTORY")  # redis://HOST:PORT/NUMBER
PLAN = os.environ.get("HIERSPEC_PLAN", "auto")
SESSION = "x-session-id"  # the header that Ray Serve itself reads; let a gateway that knows its users set it
_ATTEMPTS = 8  # while replicas die
_PAUSE = 0.25  # seconds, doubled: time for the router to hear of a death


@serve.deployment(
    num_replicas=REPLICAS,
    max_ongoing_requests=64,
    request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
)
class Writer:
    """One model. Requests that run at the same time share its forward passes."""

    def __init__(self, source: str | None, history: str | None, plan: str) -> None:
        model = hierspec.load(source, history=history)  # refuses to start where the database does not answer
        self._plan = model.plan(plan)
        model.hierarchy(self._plan)
        self._model = hierspec.AsyncLanguageModel(model)

    async def write(self, user: str, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
        answer = await self._model.generate(prompt, plan=self._plan, namespace=user, **options)
        drafted = sum(source != "target" for source in answer.sources)
        return {"text": answer.text, "tokens": len(answer.tokens), "drafted": drafted, "process": os.getpid()}


@serve.deployment(max_ongoing_requests=1024)
class Front:
    """Reads requests, and asks another writer where one has died."""

    def __init__(self, writers: DeploymentHandle) -> None:
        self._writers = writers

    async def __call__(self, request: Request) -> JSONResponse:
        body, user = await request.json(), request.headers.get(SESSION, "")
        if not isinstance(body, dict) or not isinstance(body.get("prompt"), str):
            return JSONResponse({"error": "Send a JSON object with a prompt."}, 400)
        options = {name: body[name] for name in ("max_tokens", "temperature", "seed") if name in body}
        options.setdefault("seed", random.getrandbits(31))  # so that whoever answers writes the same
        try:
            return JSONResponse(await self._ask(user, body["prompt"], options))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, hierspec.HierspecError):
                return JSONResponse({"error": str(error.cause)}, 400)
            raise

    async def _ask(self, user: str, prompt: str, options: dict[str, Any]) -> dict[str, Any]:
        writers = self._writers.options(session_id=user)
        for attempt in range(_ATTEMPTS):
            try:
                answer: dict[str, Any] = await writers.write.remote(user, prompt, options)
                return {**answer, "attempts": attempt + 1}
            except (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError):
                if attempt == _ATTEMPTS - 1:
                    raise
                await asyncio.sleep(_PAUSE * 2**attempt)
        raise AssertionError("the last attempt returns or raises")


writers: Any = Writer  # deployments, which the decorators made of the classes
front: Any = Front
application = front.bind(writers.bind(MODEL, HISTORY, PLAN))
