"""Errors as clients of OpenAI's API expect them: a status and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.responses import Response

JSON = "application/json"

# SGLang's sentences about prompts that do not fit; clients key on OpenAI's code for it.
_CONTEXT_SENTENCES = ("context length", "completion tokens")

# SGLang masks the tokens that a request's grammar does not allow, and calls it an internal error where the grammar then
# refuses what was chosen. Where all are masked, the grammar has no way on, that is token 0, the first of equals; and a
# refused first token. Any other refusal may be a fault of the engine's, such as a mask that it forgot.
_DEAD_END = re.compile(r"Grammar accept_token failed: Tokens not accepted: (0\n|\d+\nAccepted tokens: \[\])")
_DEAD_END_MESSAGE = (
    "no answer can satisfy response_format, tools, json_schema, regex or ebnf of this request: its grammar comes to a "
    "point where no token is allowed; look for a $ref or a rule that leads only back to itself"
)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A request that fails with an answer. `message` is sent to the client: no secrets, no file names.

    `raw`: an answer of the engine that already is in OpenAI's shape, and goes out as it came.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: str | None = None,
        raw: bytes | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after
        self._raw = raw

    def body(self) -> bytes:
        """The JSON object."""
        if self._raw is not None:
            return self._raw
        error = {"message": self.message, "type": error_type(self.status), "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def event(self) -> bytes:
        """The same as one server-sent event, for a stream whose status is already sent."""
        return b"data: " + json.dumps(json.loads(self.body())).encode() + b"\n\n"

    def response(self) -> Response:
        """The same as a whole HTTP response."""
        headers = {"Retry-After": self.retry_after} if self.retry_after else {}
        return Response(self.body(), status_code=self.status, headers=headers, media_type=JSON)


def error_type(status: int) -> str:
    """OpenAI's `type` for an HTTP status."""
    return _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")


def unavailable(message: str, *, code: str) -> ApiError:
    """503 that tells when to come back."""
    return ApiError(503, message, code=code, retry_after="5")


def engine_error(status: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """What the engine said with an error status, in OpenAI's shape.

    SGLang answers `{"object": "error", "message", "type", "param", "code"}`; what is no JSON object is quoted in part.
    """
    found = _json_object(body)
    if found is None:
        text = body[:300].decode("utf-8", errors="replace").strip()
        return ApiError(status, f"the engine answered {status}: {text or 'no text'}", retry_after=retry_after)
    inner = found.get("error")
    if isinstance(inner, dict) and {"message", "type"} <= inner.keys():
        return ApiError(status, str(inner["message"]), retry_after=retry_after, raw=body)
    return _from_object(status, inner or found, retry_after)


def streamed_error(data: bytes) -> ApiError | None:
    """The error that a stream's first event carries, or None if the event is something else."""
    found = _json_object(data) if b'"error"' in data else None
    error = found.get("error") if found else None
    if not error:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code <= 599 else 500
    return _from_object(status, error, None)


def _json_object(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _from_object(status: int, error: Any, retry_after: str | None) -> ApiError:
    fields = error if isinstance(error, dict) else {"message": error}
    message = str(fields.get("message") or fields.get("detail") or f"the engine answered {status}")
    message = message.partition("\n\n  File ")[0]  # FastAPI ends a validation error with the server's own file
    if _DEAD_END.match(message):
        return ApiError(400, _DEAD_END_MESSAGE, code="invalid_value")
    param, code = fields.get("param"), fields.get("code")
    if status == 400 and any(sentence in message for sentence in _CONTEXT_SENTENCES):
        code = "context_length_exceeded"
    return ApiError(
        status,
        message,
        code=code if isinstance(code, str) else None,
        param=param if isinstance(param, str) else None,
        retry_after=retry_after,
    )
