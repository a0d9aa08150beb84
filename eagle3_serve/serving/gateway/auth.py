"""Who may call what: applications with the API key, operators with the admin key."""

from __future__ import annotations

import hmac

from pydantic import SecretStr
from starlette.types import ASGIApp, Receive, Scope, Send

from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.serving.gateway.errors import ApiError

_OPEN = frozenset(("/health", "/ready"))
_ADMIN_PREFIX = "/internal"


class Auth:
    """Raises ApiError 401 or 403 before anything else looks at the request."""

    def __init__(self, app: ASGIApp, keys: GatewayKeys) -> None:
        self._app = app
        self._api_key = _encoded(keys.api_key)
        self._admin_key = _encoded(keys.admin_key)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            self._require(scope["path"], _bearer(scope["headers"]))
        await self._app(scope, receive, send)

    def _require(self, path: str, token: bytes | None) -> None:
        # Both are always compared, each in constant time.
        is_user, is_admin = _same(token, self._api_key), _same(token, self._admin_key)
        if is_admin:
            return
        if path.startswith(_ADMIN_PREFIX):
            if self._admin_key is None:
                message = "admin routes are off; set gateway.admin_key or gateway.admin_key_file to enable them"
                raise ApiError(403, message, code="admin_disabled")
            if is_user:
                raise ApiError(403, "this route needs the admin key", code="admin_key_required")
            raise _unauthorized(token)
        if self._api_key is not None and not is_user:
            raise _unauthorized(token)


def _unauthorized(token: bytes | None) -> ApiError:
    if token is None:
        return ApiError(401, "no API key: send it as 'Authorization: Bearer KEY'", code="missing_api_key")
    return ApiError(401, "the API key is not valid", code="invalid_api_key")


def _bearer(headers: list[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            return token.strip() if scheme.lower() == b"bearer" else b""
    return None


def _encoded(key: SecretStr | None) -> bytes | None:
    return None if key is None else key.get_secret_value().encode()


def _same(token: bytes | None, key: bytes | None) -> bool:
    return hmac.compare_digest(token or b"", key or b"") and bool(key)
