"""What is checked before a request reaches the engine: only what the engine would get wrong, or get late."""

from __future__ import annotations

import json
from typing import Any

from starlette.requests import Request

from eagle3_serve.serving.gateway.errors import JSON, ApiError

# OpenAI's own limit; the engine would start as many sequences as it is asked for.
_MOST_CHOICES = 128
_MOST_LOGPROBS = 20


async def read_body(request: Request, limit: int) -> bytes:
    """The request's bytes, at most `limit`. Raises ApiError 413, and ClientDisconnect if the client leaves."""
    too_large = ApiError(413, f"the request body is larger than {limit} bytes", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def require_json(request: Request) -> None:
    """Raise ApiError 415 unless the request says that it carries plain JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != JSON:
        raise ApiError(415, f"Content-Type must be {JSON}", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "compressed request bodies are not supported", code="unsupported_media_type")


def check_generation(body: bytes, served_name: str, vocab_size: int | None) -> bool:
    """Check a completion request; True if it asks for a stream. Raises ApiError 400 or 404.

    `vocab_size`: token ids from it on are refused, because the engine's scheduler dies of one; None: it is not known.
    """
    fields = _parse(body)
    _check_model(fields, served_name)
    for name in ("max_tokens", "max_completion_tokens"):
        _check_count(fields, name)
    for name in ("n", "best_of"):
        _check_count(fields, name, most=_MOST_CHOICES)
    for name in ("top_logprobs", "logprobs"):
        if not isinstance(fields.get(name), bool):  # a chat's logprobs is a switch, a completion's a number
            _check_count(fields, name, least=0, most=_MOST_LOGPROBS)
    _check_token_ids(fields.get("prompt"), vocab_size)
    _check_logit_bias(fields.get("logit_bias"), vocab_size)
    stream = fields.get("stream")
    if "stream" in fields and not isinstance(stream, bool):
        raise _bad("stream", "stream must be true or false")  # null is an error to SGLang too
    return stream is True


def unknown_model(name: str, served_name: str) -> ApiError:
    """OpenAI's answer to a model that is not served."""
    shown = name if len(name) <= 100 else name[:100] + "..."
    message = f"The model {shown!r} does not exist; this server has {served_name!r}"
    return ApiError(404, message, code="model_not_found", param="model")


def _parse(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except UnicodeDecodeError:
        raise ApiError(400, "the request body is not UTF-8", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the request body is nested too deeply", code="invalid_json") from None
    except ValueError as error:
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, "the request body must be a JSON object", code="invalid_json")
    return fields


def _check_model(fields: dict[str, Any], served_name: str) -> None:
    name = fields.get("model")
    if name is None:
        raise _bad("model", f"model is missing; this server has {served_name!r}")
    if not isinstance(name, str):
        raise _bad("model", "model must be a string")
    if name != served_name:
        raise unknown_model(name, served_name)


def _check_token_ids(prompt: Any, vocab_size: int | None) -> None:
    """A prompt of token ids, or a list of such prompts; text is the engine's business."""
    if not isinstance(prompt, list):
        return
    for item in prompt:
        for each in item if isinstance(item, list) else [item]:
            if isinstance(each, int) and not _is_token(each, vocab_size):
                raise _bad("prompt", f"token id {each} is not in the vocabulary")


def _check_logit_bias(bias: Any, vocab_size: int | None) -> None:
    for name in bias if isinstance(bias, dict) else ():
        if not name.isdecimal() or not _is_token(int(name), vocab_size):
            raise _bad("logit_bias", f"token id {name[:20]} is not in the vocabulary")


def _is_token(number: int, vocab_size: int | None) -> bool:
    return number >= 0 and (vocab_size is None or number < vocab_size)


def _check_count(fields: dict[str, Any], name: str, *, least: int = 1, most: int | None = None) -> None:
    """SGLang reads max_tokens 0 of a chat as "no limit", and "16" as 16; here both are errors. null is its default."""
    value = fields.get(name)
    if value is None:
        return
    # JSON has one number type: 1e3 and 1000.0 are whole numbers too.
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and not (isinstance(value, float) and value.is_integer()):
        raise _bad(name, f"{name} must be a whole number")
    if value < least:
        raise _bad(name, f"{name} must be at least {least}")
    if most is not None and value > most:
        raise _bad(name, f"{name} must be at most {most}")


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)


def read_request_ids(body: bytes) -> list[str]:
    """`{"rids": ["...", ...]}`. Raises ApiError 400."""
    rids = _parse(body).get("rids")
    if not isinstance(rids, list) or not rids or not all(isinstance(rid, str) for rid in rids):
        raise ApiError(400, "rids must be a list of request ids", code="invalid_parameter", param="rids")
    return rids
