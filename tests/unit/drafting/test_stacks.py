"""Servers to verify: what is attached to, what is started, and that signals and failures leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from pydantic import SecretStr

from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.core.client import EngineClient, GatewayClient
from eagle3_serve.core.errors import (
    CheckpointError,
    ConfigError,
    EngineRequestError,
    InterruptedLoadError,
    TerminatedLoadError,
)
from eagle3_serve.core.process import free_port
from eagle3_serve.core.reporter import PlainReporter
from eagle3_serve.drafting.stacks import ConfigSource, Server, attached, connect, run_until_done, started
from tests.support.scripted_upstream import Answering, Received, scripted_upstream
from tests.support.toy_sglang import ToySglang


def test_overrides_win_over_flags_and_the_ports_are_free_ones() -> None:
    source = ConfigSource(None, ("drafter.num_steps=2", "drafter.num_draft_tokens=3", "gateway.port=1234"), {})
    config = source.resolve("drafter.num_steps=3", "drafter.topk=4", "drafter.num_draft_tokens=8").config
    assert (config.drafter.num_steps, config.drafter.topk, config.drafter.num_draft_tokens) == (3, 4, 8)
    assert (config.gateway.port, config.engine.port) == (0, 0)


def test_a_shape_that_cannot_be_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="num_draft_tokens"):
        ConfigSource(None).resolve("drafter.num_steps=3", "drafter.num_draft_tokens=9")


async def test_sglang_itself_is_asked_in_its_own_api() -> None:
    async with scripted_upstream() as upstream:
        ToySglang().attach(upstream)
        server = await attached(upstream.url + "/", GatewayKeys())
    assert server == Server(upstream.url, "toy", upstream.url, GatewayKeys())
    assert isinstance(connect(server), EngineClient)


async def test_a_gateway_is_asked_in_openais_api_with_the_configured_key() -> None:
    async def models(request: Received, answering: Answering) -> None:
        await answering.json(200, {"data": [{"id": "kimi"}]})

    keys = GatewayKeys(api_key=SecretStr("hunter2"))
    async with scripted_upstream() as upstream:
        upstream.on("/v1/models", models)
        server = await attached(upstream.url, keys)
        assert upstream.requests("/v1/models")[0].header("authorization") == "Bearer hunter2"
    assert (server.model, server.engine_url) == ("kimi", None)
    assert isinstance(connect(server), GatewayClient)
    assert "hunter2" not in repr(server)


async def test_a_server_that_is_not_there_is_one_clear_error() -> None:
    with pytest.raises(EngineRequestError, match="no answer"):
        await attached(f"http://127.0.0.1:{free_port()}", GatewayKeys())


async def test_a_refused_key_is_an_error_that_says_where_keys_go() -> None:
    async def refuse(request: Received, answering: Answering) -> None:
        await answering.json(401, {"error": {"message": "the API key is not valid"}})

    async with scripted_upstream() as upstream:
        upstream.on("/v1/models", refuse)
        with pytest.raises(EngineRequestError, match="401") as error:
            await attached(upstream.url, GatewayKeys(api_key=SecretStr("hunter2")))
    assert "EAGLE3_SERVE__GATEWAY__API_KEY" in error.value.remedy
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        (401, "EAGLE3_SERVE__GATEWAY__API_KEY"),
        (403, "EAGLE3_SERVE__GATEWAY__API_KEY"),
        (404, "the address must be that of a gateway"),
        (429, "wait until GET /ready answers 200"),
        (503, "wait until GET /ready answers 200"),
        (500, "its log says more"),
        (502, "its log says more"),
        (400, "what the server does not take"),
    ],
)
async def test_each_status_has_its_own_remedy(status: int, remedy: str) -> None:
    async with scripted_upstream() as upstream:
        upstream.on("/v1/models", lambda _, answering: answering.json(status, {"error": {"message": "no"}}))
        with pytest.raises(EngineRequestError, match=f"answered {status}") as error:
            await attached(upstream.url, GatewayKeys())
    assert remedy in error.value.remedy
    assert ("KEY" in error.value.remedy) == (status in (401, 403))


async def test_a_web_server_of_another_kind_is_no_server_to_attach_to() -> None:
    async with scripted_upstream() as upstream:
        upstream.on(
            "/v1/models", lambda _, answering: answering.whole(200, b"<html>", (("content-type", "text/html"),))
        )
        with pytest.raises(EngineRequestError, match="names no model") as error:
            await attached(upstream.url, GatewayKeys())
    assert "without a path" in error.value.remedy


async def test_a_stack_that_cannot_start_raises_what_a_launch_raises(tmp_path: Path) -> None:
    source = ConfigSource(None, (f"target.path={tmp_path}/none", f"paths.run_dir={tmp_path}"), {})
    with pytest.raises(CheckpointError, match="none"):
        async with started(source.resolve(), PlainReporter(), "test"):
            pytest.fail("it started")


@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGINT, InterruptedLoadError), (signal.SIGTERM, TerminatedLoadError)]
)
def test_a_signal_cancels_the_work_and_waits_for_its_clean_up(
    number: signal.Signals, kind: type[InterruptedLoadError]
) -> None:
    steps: list[str] = []

    async def main() -> None:
        steps.append("begin")
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.05)
            steps.append("cleaned up")

    with pytest.raises(kind, match=f"{number.name}: stopped"):
        run_until_done(main)
    assert steps == ["begin", "cleaned up"]


def test_without_a_signal_the_result_or_the_error_comes_back() -> None:
    async def good() -> int:
        return 7

    async def bad() -> int:
        raise ConfigError("wrong")

    assert run_until_done(good) == 7
    with pytest.raises(ConfigError, match="wrong"):
        run_until_done(bad)
