"""The engine's HTTP side: one request at a time out of a pool, headers and bytes as they are."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable

import httpx

_CONNECT_TIMEOUT_S = 5.0
# Below the five seconds after which SGLang closes an idle connection, so that a request is not sent into a closing one.
_IDLE_S = 3.0

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Authorization is the gateway's own key. The engine must not compress: events are looked at. The rest is set anew.
_NOT_FORWARDED = _HOP_BY_HOP | {b"host", b"authorization", b"content-length", b"accept-encoding", b"expect"}
# The server in front sets these.
_NOT_RETURNED = _HOP_BY_HOP | {b"content-length", b"date", b"server", b"x-request-id"}


class UpstreamResponse:
    """Status and headers have arrived, the body may still be coming."""

    def __init__(self, response: httpx.Response, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream
        self.status = response.status_code
        self.media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.retry_after: str | None = response.headers.get("retry-after")
        self.headers = _without(response.headers.raw, _NOT_RETURNED)

    def chunks(self) -> AsyncIterator[bytes]:
        """The body's bytes as they arrive. Raises httpx.HTTPError if the connection ends early."""
        return self._stream.__aiter__()

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self._stream])


class Upstream:
    """`base_url` of the engine. No proxies, no redirects, no retries, no cookies, no limit on waiting for an answer."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url.rstrip("/")
        # The transport below httpx's client: the client would add headers, normalise paths and log each request.
        self._transport = httpx.AsyncHTTPTransport(
            verify=False,  # the engine speaks plain HTTP: no certificates to load
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_IDLE_S),
        )

    @contextlib.asynccontextmanager
    async def exchange(
        self,
        method: str,
        path: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes = b"",
    ) -> AsyncIterator[UpstreamResponse]:
        """Send one request; the block gets the response as soon as its headers are there.

        Leaving the block before the body has ended closes the connection, which is how SGLang learns that nobody
        waits any more. Raises httpx.HTTPError.
        """
        request = httpx.Request(
            method,
            self._base_url + path,
            headers=[*_without(headers, _NOT_FORWARDED), (b"Accept-Encoding", b"identity")],
            content=body,
            extensions={"timeout": {"connect": _CONNECT_TIMEOUT_S, "read": None, "write": None, "pool": None}},
        )
        response = await self._transport.handle_async_request(request)
        stream = response.stream
        assert isinstance(stream, httpx.AsyncByteStream)
        try:
            yield UpstreamResponse(response, stream)
        finally:
            await stream.aclose()

    async def close(self) -> None:
        """Close the pool."""
        await self._transport.aclose()


def _without(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    pairs = list(headers)
    named = {name.strip().lower() for key, value in pairs if key.lower() == b"connection" for name in value.split(b",")}
    return [(key, value) for key, value in pairs if key.lower() not in dropped and key.lower() not in named]
