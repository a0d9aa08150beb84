"""Servers to verify: whole stacks that are started for it, one after the other, or one that runs already.

    source = ConfigSource(path, sets, os.environ)
    async def main() -> None:
        async with started(source.resolve("tap.mode=probe"), reporter, "with the drafter") as server:
            ...  # server.url, server.engine_url, server.plan
    run_until_done(main)

The gateway lives in this process's event loop: requests to it must be awaited, or made in another thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import SecretStr

from eagle3_serve.config.artifacts import RUN_FILE
from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.config.resolve import Resolved, load_config
from eagle3_serve.config.schema import Config
from eagle3_serve.core.client import EngineClient, GatewayClient, ServerClient
from eagle3_serve.core.errors import (
    ConfigError,
    EagleServeError,
    EngineRequestError,
    InterruptedLoadError,
    TerminatedLoadError,
)
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.verify.prompts import local_tokenizer
from eagle3_serve.serving import flow
from eagle3_serve.serving.launch import StopRequest
from eagle3_serve.serving.plan import LaunchPlan

T = TypeVar("T")

# Ports of a running server stay free for it, and of two stacks none is in the other's way.
_ANY_PORT = ("gateway.port=0", "engine.port=0")
# A dead engine is noticed by polling: how long a failed request waits for that better explanation.
_DEATH_NOTICE_S = 2.0
_LOOK_TIMEOUT_S = 20.0
# Releases whose /tokenize takes text only, no conversation.
_WITHOUT_CHAT_TOKENIZE = ("0.5.9",)


@dataclass(frozen=True)
class ConfigSource:
    """Where a configuration comes from, so that it can be resolved again with other values."""

    path: Path | None
    sets: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)

    def resolve(self, *overrides: str) -> Resolved:
        """The configuration with `overrides` (`drafter.topk=4`) over everything else, on free ports.

        Raises ConfigError.
        """
        return load_config(self.path, sets=(*self.sets, *overrides, *_ANY_PORT), environ=self.environ)


@dataclass(frozen=True)
class Server:
    """A server that answers. `url`: of the gateway, without /v1; `engine_url`: SGLang's own API, where it is reachable.

    `plan` and `config` are None for a server that somebody else started.
    """

    url: str
    model: str
    engine_url: str | None = None
    keys: GatewayKeys = field(default_factory=GatewayKeys)
    plan: LaunchPlan | None = None
    config: Config | None = None

    @property
    def api_key(self) -> str | None:
        """What applications send as `Authorization: Bearer`."""
        return _text(self.keys.api_key)

    @property
    def admin_key(self) -> str | None:
        """What /internal routes need."""
        return _text(self.keys.admin_key)


@contextlib.asynccontextmanager
async def started(resolved: Resolved, reporter: Reporter, name: str) -> AsyncIterator[Server]:
    """Start a whole stack, wait until it serves, and leave no process of it behind, however the block ends.

    `name` says in progress lines which of several stacks this is. Raises what `launch` raises, and in place of a
    failed request EngineDiedError when the engine has died meanwhile.
    """
    urgent = asyncio.Event()
    async with flow.serving(resolved, _Named(reporter, name), urgent) as stack:
        try:
            served = await stack.ready()
            reporter.event("ready", f"{name}: ready after {served.ready_s:.1f} s", arm=name, ready_s=served.ready_s)
            watch = asyncio.create_task(stack.watch(urgent))
            try:
                yield Server(
                    url=served.url,
                    model=served.plan.served_name,
                    engine_url=served.engine_url,
                    keys=resolved.secrets,
                    plan=served.plan,
                    config=resolved.config,
                )
            except EngineRequestError as error:
                await asyncio.wait({watch}, timeout=_DEATH_NOTICE_S)
                if watch.done() and (reason := watch.exception()) is not None:
                    raise reason from error
                raise
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
        finally:
            urgent.set()  # nobody waits for an answer any more: no drain


async def attached(url: str, keys: GatewayKeys) -> Server:
    """A server that runs already: a gateway, or SGLang itself. Raises EngineRequestError, and ConfigError for a `url`
    that is none."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url} is no address of a server", remedy="such as http://127.0.0.1:30080")
    async with EngineClient(url.rstrip("/"), api_key=_text(keys.api_key), timeout_s=_LOOK_TIMEOUT_S) as client:
        served = await client.served_model()
        is_engine = await client.is_engine()
    return Server(url.rstrip("/"), served, url.rstrip("/") if is_engine else None, keys)


def config_of(info: Mapping[str, object], source: ConfigSource) -> Config:
    """What a running server was started with, if its run.yaml lies on this machine; else the configuration given.

    `info`: its /internal/info. Raises ConfigError where there is neither.
    """
    run_file = Path(str(info.get("run_dir"))) / RUN_FILE
    if source.path is None and run_file.is_file():
        return ConfigSource(run_file, source.sets, source.environ).resolve().config
    if source.path is None:
        raise ConfigError(
            f"what the server was started with ({run_file}) cannot be read on this machine",
            remedy="give its configuration with --config, for the paths of target and drafter",
        )
    return source.resolve().config


def served_facts(server: Server) -> dict[str, Any]:
    """What was served, for reports: the address of a running server, else checkpoints, release and overlay."""
    if server.plan is None or server.config is None:
        return {"url": server.url}
    return {
        "target": str(server.config.target.path),
        "drafter": str(server.config.drafter.path),
        "sglang": server.plan.overlay.release,
        "overlay": server.plan.overlay.id,
    }


def connect(server: Server) -> ServerClient:
    """A client for token ids: SGLang's own API where it can be reached, else the gateway's."""
    if server.engine_url is None:
        return GatewayClient(server.url, model=server.model, api_key=server.api_key)
    # The engine behind our own gateway has no key; a server that somebody else started may.
    api_key = None if server.plan else server.api_key
    tokenize = None
    if server.plan and server.config and server.plan.overlay.release in _WITHOUT_CHAT_TOKENIZE:
        target = server.config.target
        tokenize = local_tokenizer(target.path, trust_remote_code=target.trust_remote_code)
    return EngineClient(server.engine_url, api_key=api_key, tokenize=tokenize)


def run_until_done(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """`asyncio.run`, in which SIGINT and SIGTERM cancel `main`, so that its stacks are taken down in order.

    Raises InterruptedLoadError or TerminatedLoadError then.
    """
    return asyncio.run(_stoppable(main))


async def _stoppable(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    stop = StopRequest()
    stop.install()
    work = asyncio.create_task(main())
    stopped = asyncio.create_task(stop.event.wait())
    await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not work.done():
        work.cancel()
        await asyncio.wait({work})
    if stop.signal is not None and (work.cancelled() or not isinstance(work.exception(), EagleServeError | None)):
        kind = TerminatedLoadError if stop.signal == signal.SIGTERM else InterruptedLoadError
        raise kind(f"{stop.signal.name}: stopped, nothing left running")
    return work.result()


class _Named:
    """A reporter that says which stack speaks, and keeps a start's good news to itself."""

    def __init__(self, inner: Reporter, name: str) -> None:
        self._inner = inner
        self._name = name

    def event(self, name: str, text: str, **facts: Any) -> None:
        if name != "ok":
            self._inner.event(name, f"{self._name}: {text}", arm=self._name, **facts)

    def stage(self, text: str, seconds: float) -> None:
        self._inner.stage(f"{self._name}: {text}", seconds)

    def progress(self, doing: str, done: float, total: float, **facts: Any) -> None:
        self._inner.progress(f"{self._name}: {doing}", done, total, **facts)

    def __enter__(self) -> _Named:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def _text(key: SecretStr | None) -> str | None:
    return key.get_secret_value() if key is not None else None
