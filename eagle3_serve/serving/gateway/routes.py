"""The routes, each a few lines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import quote

import httpx
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.types import Receive, Scope, Send

from eagle3_serve.core.errors import EngineRequestError
from eagle3_serve.serving.gateway import checks
from eagle3_serve.serving.gateway.errors import ApiError
from eagle3_serve.serving.gateway.metrics import CONTENT_TYPE
from eagle3_serve.serving.gateway.proxy import EngineCall, EngineResponse
from eagle3_serve.serving.gateway.record import record_of
from eagle3_serve.serving.gateway.state import Gateway

_CHAT = "/v1/chat/completions"
_LOOK = ["GET", "HEAD"]  # load balancers use either


def build_router(gateway: Gateway) -> APIRouter:
    """All routes of one gateway."""
    router = APIRouter(redirect_slashes=False)
    _add_api(router, gateway)
    _add_operations(router, gateway)
    return router


def _add_api(router: APIRouter, gateway: Gateway) -> None:
    @router.post(_CHAT)
    async def chat_completions(request: Request) -> Response:
        return await generate(request, _CHAT)

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, "/v1/completions")

    @router.get("/v1/models")
    async def models(request: Request) -> Response:
        return forward(EngineCall("GET", "/v1/models", _headers(request)))

    @router.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        if name != gateway.served_name:
            raise checks.unknown_model(name, gateway.served_name)
        return forward(EngineCall("GET", "/v1/models/" + quote(name), _headers(request)))

    async def generate(request: Request, path: str) -> Response:
        checks.require_json(request)
        body = await checks.read_body(request, gateway.config.max_body_bytes)
        record_of(request.scope).request_bytes = len(body)
        chat = path == _CHAT
        stream = checks.check_generation(body, gateway.served_name, gateway.vocab_size, chat=chat)
        return forward(EngineCall("POST", path, _headers(request), body, stream))

    def forward(call: EngineCall) -> Response:
        return EngineResponse(call, gateway.upstream, gateway.drain, gateway.metrics, gateway.config.keepalive_s)


def _add_operations(router: APIRouter, gateway: Gateway) -> None:
    @router.api_route("/health", methods=_LOOK)
    async def health() -> Response:
        """The process runs."""
        return JSONResponse({"status": "ok"})

    @router.api_route("/ready", methods=_LOOK)
    async def ready() -> Response:
        """The engine answers, and new requests are taken."""
        reason = "the server is shutting down" if gateway.drain.draining else await gateway.readiness.reason()
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, status_code=503)

    @router.get("/metrics")
    async def metrics() -> Response:
        """The engine's metrics and the gateway's."""
        engine_text = None
        engine_up = False
        if gateway.engine_alive():
            engine_up, engine_text = await _engine_metrics(gateway)
        return Response(gateway.metrics.text(engine_text, engine_up=engine_up), media_type=CONTENT_TYPE)

    @router.get("/internal/info")
    async def info() -> Response:
        """Which overlay, which layers, which convention."""
        return Response(json.dumps(dict(gateway.info()), default=str), media_type="application/json")

    @router.post("/internal/tap")
    async def tap(rank: int = 0) -> Response:
        """What the tap of one rank holds, as a safetensors file."""
        try:
            content = await asyncio.to_thread(gateway.tap.read_rank, rank)
        except EngineRequestError as error:
            raise ApiError(409, str(error), code="tap_unavailable") from error
        return Response(content, media_type="application/octet-stream")

    @router.post("/internal/tap/collect")
    async def collect(request: Request) -> Response:
        """The stored states of finished requests, as a safetensors file; the engine then forgets them."""
        checks.require_json(request)
        rids = checks.read_request_ids(await checks.read_body(request, gateway.config.max_body_bytes))
        try:
            path = await asyncio.to_thread(gateway.tap.collect, rids)
        except EngineRequestError as error:
            raise ApiError(409, str(error), code="tap_unavailable") from error
        return _OnceResponse(path, media_type="application/octet-stream")


class _OnceResponse(FileResponse):
    """A file that is removed when it was sent, or when the client left."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            Path(self.path).unlink(missing_ok=True)  # noqa: ASYNC240 - one call, of microseconds


async def _engine_metrics(gateway: Gateway) -> tuple[bool, bytes | None]:
    try:
        async with gateway.scrape_timeout(), gateway.upstream.exchange("GET", "/metrics") as answer:
            text = await answer.read()
            return True, text if answer.status == 200 else None
    except (httpx.HTTPError, TimeoutError):
        return False, None


def _headers(request: Request) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in request.headers.raw if name != b"x-request-id"]
    return [*kept, (b"x-request-id", record_of(request.scope).id.encode())]
