"""What is checked before a request reaches the engine: only what the engine would get wrong, or get late."""

from __future__ import annotations

import json
import math
import re
import warnings
from typing import Any

from starlette.requests import Request

from eagle3_serve.serving.gateway.errors import JSON, ApiError

# OpenAI's own limit; the engine would start as many sequences as it is asked for.
_MOST_CHOICES = 128
_MOST_LOGPROBS = 20
# The engine's scheduler keeps top_k in 32 bits, and dies of more.
_MOST_TOP_K = 2**31 - 1
# The engine passes these to the chat template itself; given twice, they are an internal error there.
_TEMPLATE_ARGUMENTS = ("messages", "tools", "add_generation_prompt", "tokenize", "return_dict")
_ONE_FOR_EACH_PROMPT = ("lora_path", "bootstrap_host", "bootstrap_port", "bootstrap_room")
# More or longer patterns are an error of SGLang's own, and would take long to compile.
_MOST_STOP_REGEX = 32
_LONGEST_STOP_REGEX = 256


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


def check_generation(body: bytes, served_name: str, vocab_size: int | None, *, chat: bool) -> bool:
    """Check a completion request, of a chat or of text; True if it asks for a stream. Raises ApiError 400 or 404.

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
    _check_top_k(fields.get("top_k"))
    _check_logit_bias(fields.get("logit_bias"), vocab_size)
    _check_stop_regex(fields.get("stop_regex"))
    # With min_tokens, its own or of a request in the same batch, SGLang looks these up, in a table of one column more.
    _check_token_ids("stop_token_ids", fields.get("stop_token_ids"), vocab_size and vocab_size + 1)
    _check_lists(fields, None if chat else fields.get("prompt"))
    if not chat:
        _check_prompt(fields.get("prompt"), vocab_size)
    else:
        _check_token_ids("input_ids", fields.get("input_ids"), vocab_size)
        _check_template_arguments(fields.get("chat_template_kwargs"))
        _check_response_format(fields.get("response_format"))
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


def _check_top_k(value: Any) -> None:
    if _number(value) > _MOST_TOP_K:
        raise _bad("top_k", f"top_k must be at most {_MOST_TOP_K}; leave it out, or give -1, for no limit")


def _check_prompt(prompt: Any, vocab_size: int | None) -> None:
    """Text is the engine's business, but for an empty one among others, which may come to a batch without a token."""
    if not isinstance(prompt, list):
        return
    if len(prompt) > 1 and any(item in ("", []) for item in prompt):
        raise _bad("prompt", "none of several prompts may be empty; leave it out")
    if not all(isinstance(item, str) for item in prompt):
        _check_token_ids("prompt", prompt, vocab_size)


def _check_token_ids(name: str, ids: Any, vocab_size: int | None) -> None:
    """A list of token ids, or of lists of them."""
    for item in ids if isinstance(ids, list) else ():
        for each in item if isinstance(item, list) else [item]:
            number = _number(each)
            if not math.isnan(number) and not _is_token(number, vocab_size):
                raise _bad(name, f"token id {str(each)[:20]} is not in the vocabulary")


def _check_logit_bias(bias: Any, vocab_size: int | None) -> None:
    for name in bias if isinstance(bias, dict) else ():
        if not name.isdecimal() or not _is_token(_number(name), vocab_size):
            raise _bad("logit_bias", f"token id {name[:20]} is not in the vocabulary")


def _check_stop_regex(patterns: Any) -> None:
    """Regular expressions of Python's `re`, which is what the engine searches with."""
    for pattern in patterns[:_MOST_STOP_REGEX] if isinstance(patterns, list) else [patterns]:
        if not isinstance(pattern, str) or len(pattern) > _LONGEST_STOP_REGEX:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):
                re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            message = f"stop_regex {pattern!r} is not a valid regular expression of Python: {error}"
            raise _bad("stop_regex", message) from None


def _check_lists(fields: dict[str, Any], prompt: Any) -> None:
    """Fields that may be lists with an entry for each prompt; SGLang does not look whether there are as many."""
    several = isinstance(prompt, list) and all(isinstance(item, str | list) for item in prompt)
    batch = several or _number(fields.get("n")) > 1
    if not batch and isinstance(fields.get("rid"), list):
        raise _bad("rid", "rid must be a string; a list of them is for several prompts")
    count = len(prompt) if several else 1
    for name in _ONE_FOR_EACH_PROMPT if batch else ():
        value = fields.get(name)
        if isinstance(value, list) and len(value) < count:
            raise _bad(name, f"{name} has {len(value)} entries for {count} prompts; give one for each, or one for all")


def _check_template_arguments(arguments: Any) -> None:
    for name in _TEMPLATE_ARGUMENTS if isinstance(arguments, dict) else ():
        if name in arguments:
            message = f"chat_template_kwargs may not hold {name!r}, which the server itself gives to the template"
            raise _bad("chat_template_kwargs", message)


def _check_response_format(wanted: Any) -> None:
    """Also the older spelling, with the schema beside `type`, which SGLang takes apart before it looks what it is."""
    if not wanted:
        return
    if not isinstance(wanted, dict):
        raise _bad("response_format", "response_format must be an object, such as {'type': 'json_object'}")
    schema = wanted.get("schema")
    if wanted.get("type") != "json_schema" or wanted.get("json_schema") or not schema:
        return
    properties = schema.get("properties", {}) if isinstance(schema, dict) else None
    strict = properties.get("strict") if isinstance(properties, dict) else None
    if not isinstance(properties, dict) or (strict and not isinstance(strict, dict)):
        raise _bad("response_format", "response_format.schema must be a JSON Schema object with schemas as properties")


def _number(value: Any) -> float:
    """What SGLang reads as a number: "16" and true too; NaN where it is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except ValueError:
        return math.nan
    except OverflowError:
        return math.inf


def _is_token(number: float, vocab_size: int | None) -> bool:
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
