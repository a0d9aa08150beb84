"""The gateway's own Prometheus metrics, beside those of the engine."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from eagle3_serve.serving.gateway.record import Record

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "eagle3_serve_gateway_"
_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


class GatewayMetrics:
    """One registry a gateway, so that two in one process do not share counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        route = ["route"]
        self._requests = self._counter("requests", "Answered requests; 499: the client left first", ["route", "status"])
        self._in_flight = Gauge(
            _PREFIX + "requests_in_flight", "Requests that are being answered", route, registry=self._registry
        )
        self._duration = self._histogram("request_duration_seconds", "From the headers to the answer's end")
        self._first_event = self._histogram(
            "time_to_first_token_seconds", "Streams: from the headers to the first event that the engine sent"
        )
        self._disconnects = self._counter("client_disconnects", "Clients that left before their answer's end", route)
        self._cut = self._counter("requests_cut", "Requests ended by a shutdown", route)
        self._errors = self._counter(
            "upstream_errors", "refused: no connection; lost: it broke; status: the engine answered 5xx", ["kind"]
        )
        self._request_bytes = self._counter("request_bytes", "Bytes of request bodies", route)
        self._response_bytes = self._counter("response_bytes", "Bytes of response bodies", route)
        self._engine_up = Gauge(
            "eagle3_serve_engine_up", "1 if the engine's HTTP server answers (see /ready)", registry=self._registry
        )
        for kind in ("refused", "lost", "status"):
            self._errors.labels(kind)

    def begin(self, record: Record) -> None:
        """A request has arrived."""
        self._in_flight.labels(record.route).inc()

    def end(self, record: Record) -> None:
        """Its answer has ended, one way or the other."""
        route = record.route
        self._in_flight.labels(route).dec()
        self._requests.labels(route, str(record.status)).inc()
        self._duration.labels(route).observe(record.seconds())
        self._request_bytes.labels(route).inc(record.request_bytes)
        self._response_bytes.labels(route).inc(record.response_bytes)
        if record.first_event_s is not None:
            self._first_event.labels(route).observe(record.first_event_s)
        if record.client_left:
            self._disconnects.labels(route).inc()
        if record.cut:
            self._cut.labels(route).inc()

    def upstream_error(self, kind: str) -> None:
        """The engine failed a request: `refused`, `lost` or `status`."""
        self._errors.labels(kind).inc()

    def text(self, engine_text: bytes | None, *, engine_up: bool) -> bytes:
        """Everything in Prometheus' text format: the engine's part as it came (None: it has none), then ours."""
        self._engine_up.set(1 if engine_up else 0)
        engine_part = b"" if not engine_text else engine_text.rstrip(b"\n") + b"\n"
        return engine_part + generate_latest(self._registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(_PREFIX + name, text, ["route"], buckets=_SECONDS, registry=self._registry)
