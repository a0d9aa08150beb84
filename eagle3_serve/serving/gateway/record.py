"""What the gateway notes about one request; the middleware writes it to the log and the metrics."""

from __future__ import annotations

import re
import time
import uuid
from dataclasses import dataclass, field
from typing import cast

from starlette.types import Scope

CLIENT_LEFT = 499  # as nginx logs it: the client left before there was a status

_KEY = "eagle3_serve.record"
_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_ROUTES = frozenset(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/health",
        "/ready",
        "/metrics",
        "/internal/info",
        "/internal/tap",
        "/internal/tap/collect",
    )
)


@dataclass(slots=True)
class Record:
    """One request. `route` is a fixed label, never what a client made up; times in seconds."""

    method: str
    path: str
    route: str
    id: str
    began: float = field(default_factory=time.perf_counter)
    status: int = CLIENT_LEFT
    request_bytes: int = 0
    response_bytes: int = 0
    first_event_s: float | None = None
    client_left: bool = False
    cut: bool = False

    def seconds(self) -> float:
        """Since the request's headers arrived."""
        return time.perf_counter() - self.began


def open_record(scope: Scope) -> Record:
    """Make the record of a new request and keep it in its scope."""
    path = scope["path"]
    record = Record(method=scope["method"], path=path, route=_route(path), id=_request_id(scope["headers"]))
    scope[_KEY] = record
    return record


def record_of(scope: Scope) -> Record:
    """The record that `open_record` put there."""
    return cast(Record, scope[_KEY])


def _route(path: str) -> str:
    if path in _ROUTES:
        return path
    return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


def _request_id(headers: list[tuple[bytes, bytes]]) -> str:
    for name, value in headers:
        # Anything else could break a log line or a header.
        if name == b"x-request-id" and _SAFE_ID.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex
