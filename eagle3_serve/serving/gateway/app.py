"""The gateway as an ASGI application: everything is made here, nothing lives in a module."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.config.schema import GatewayConfig
from eagle3_serve.serving.gateway.auth import Auth
from eagle3_serve.serving.gateway.drain import Drain
from eagle3_serve.serving.gateway.errors import ApiError
from eagle3_serve.serving.gateway.metrics import GatewayMetrics
from eagle3_serve.serving.gateway.middleware import Answer, Gate, Observe
from eagle3_serve.serving.gateway.readiness import Readiness
from eagle3_serve.serving.gateway.routes import build_router
from eagle3_serve.serving.gateway.state import Gateway, Tap
from eagle3_serve.serving.gateway.upstream import Upstream


def create_app(
    config: GatewayConfig,
    *,
    upstream: str,
    served_name: str,
    keys: GatewayKeys,
    engine_alive: Callable[[], bool],
    info: Callable[[], Mapping[str, Any]],
    tap: Tap,
    vocab_size: int | None = None,
) -> FastAPI:
    """The application before the engine at `upstream` (`http://127.0.0.1:PORT`).

    `vocab_size`: the target's, to refuse token ids beyond it.
    `engine_alive` says whether the engine's process runs; `info` is what `/internal/info` answers,
    `tap` is what `/internal/tap` reads.
    """
    engine = Upstream(upstream)
    gateway = Gateway(
        config=config,
        served_name=served_name,
        vocab_size=vocab_size,
        upstream=engine,
        drain=Drain(),
        metrics=GatewayMetrics(),
        readiness=Readiness(engine, engine_alive, config.ready_timeout_s),
        engine_alive=engine_alive,
        info=info,
        tap=tap,
    )
    app = FastAPI(
        title="eagle3-serve",
        lifespan=_lifespan,
        # The API is OpenAI's, and the pages would load scripts from elsewhere: docs/api.md instead.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _routing_error, RequestValidationError: _parameter_error},
        # Outermost first.
        middleware=[
            Middleware(Observe, metrics=gateway.metrics),
            Middleware(Answer),
            Middleware(Auth, keys=keys),
            Middleware(Gate, drain=gateway.drain),
        ],
    )
    app.state.gateway = gateway
    app.include_router(build_router(gateway))
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    gateway: Gateway = app.state.gateway
    try:
        yield
    finally:
        await gateway.readiness.close()
        await gateway.upstream.close()


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        answer = ApiError(405, f"{request.method} is not allowed here", code="method_not_allowed")
    elif error.status_code == 404:
        answer = ApiError(404, "there is no such route; see docs/api.md", code="unknown_url")
    else:
        answer = ApiError(error.status_code, str(error.detail))
    response = answer.response()
    response.headers.update(error.headers or {})
    return response


async def _parameter_error(request: Request, error: Exception) -> Response:
    """For what FastAPI reads itself, which are query parameters only."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return ApiError(400, str(first["msg"]), code="invalid_parameter", param=str(first["loc"][-1])).response()
