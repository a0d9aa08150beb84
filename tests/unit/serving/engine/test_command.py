from __future__ import annotations

import pytest
from pydantic import ValidationError

from eagle3_serve.config.schema import Config
from eagle3_serve.config.sglang_arguments import owned_arguments
from eagle3_serve.serving.engine.command import engine_command, process_environment


def make(**engine: object) -> Config:
    return Config.model_validate(
        {"target": {"path": "/models/t"}, "drafter": {"path": "/models/d"}, "engine": {"port": 1, **engine}}
    )


def argv(config: Config, release: str = "0.5.23") -> list[str]:
    return list(engine_command(config, python="python3", port=31000, release=release))


def value(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_drafter_is_served_as_eagle3_with_its_shape() -> None:
    arguments = argv(make())
    assert value(arguments, "--speculative-algorithm") == "EAGLE3"
    assert value(arguments, "--speculative-draft-model-path") == "/models/d"
    assert value(arguments, "--speculative-num-draft-tokens") == "4"


def test_without_the_drafter_nothing_speculates() -> None:
    config = make().model_copy(update={"drafter": make().drafter.model_copy(update={"enabled": False})})
    assert not [part for part in argv(config) if part.startswith("--speculative")]


def test_extra_arguments_pass_through_in_every_form() -> None:
    extra = {
        "schedule-policy": "lpm",
        "--enable-mixed-chunk": True,
        "cuda_graph_bs": [1, 8],
        "off": False,
        "none": None,
    }
    arguments = argv(make(extra_args=extra))
    assert value(arguments, "--schedule-policy") == "lpm"
    assert "--enable-mixed-chunk" in arguments
    at = arguments.index("--cuda-graph-bs")
    assert arguments[at + 1 : at + 3] == ["1", "8"]
    assert "--off" not in arguments
    assert "--none" not in arguments


@pytest.mark.parametrize("name", sorted(owned_arguments()))
def test_an_argument_that_the_configuration_owns_is_refused_in_extra_args(name: str) -> None:
    for spelling in (name, f"--{name}", name.replace("-", "_")):
        with pytest.raises(ValidationError, match="is set by"):
            make(extra_args={spelling: "1"})


@pytest.mark.parametrize("name", ["speculative-draft-model-p", "tensor-parallel", "mem-frac", "context-len"])
def test_an_abbreviation_of_an_owned_argument_is_refused_too(name: str) -> None:
    with pytest.raises(ValidationError, match="is set by"):
        make(extra_args={name: "1"})


def test_every_argument_that_is_written_is_owned_by_the_configuration() -> None:
    full = make(
        attention_backend="triton",
        mem_fraction_static=0.9,
        context_length=1,
        max_running_requests=1,
        max_total_tokens=1,
        chunked_prefill_size=1,
        kv_cache_dtype="bfloat16",
        prefix_cache=False,
        cuda_graph={"max_batch_size": 16},
        reasoning_parser="kimi_k2",
        tool_call_parser="kimi_k2",
    )
    written = {part.lstrip("-") for part in argv(full) if part.startswith("--")}
    assert written <= set(owned_arguments())


def test_the_graph_size_is_spelled_as_the_release_wants_it() -> None:
    config = make(cuda_graph={"max_batch_size": 16})
    assert value(argv(config, "0.5.23"), "--cuda-graph-max-bs-decode") == "16"
    assert value(argv(config, "0.5.9"), "--cuda-graph-max-bs") == "16"


def test_cuda_graphs_can_be_turned_off() -> None:
    assert "--disable-cuda-graph" in argv(make(cuda_graph={"enabled": False}))
    assert "--disable-cuda-graph" not in argv(make())


def test_the_engine_inherits_no_key_and_no_layer_from_the_launchers_environment() -> None:
    inherited = {"EAGLE3_SERVE__GATEWAY__ADMIN_KEY": "k", "EAGLE3_SERVE_AUX_LAYERS": "1,2,3", "HOME": "/h"}
    environment = process_environment(inherited, {"EAGLE3_SERVE_DEVICE": "cpu"}, "127.0.0.1")
    assert environment["HOME"] == "/h"
    assert {name for name in environment if name.startswith("EAGLE3_SERVE_")} == {"EAGLE3_SERVE_DEVICE"}


def test_the_engine_never_asks_itself_through_a_proxy() -> None:
    inherited = {"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "internal"}
    environment = process_environment(inherited, {}, "10.0.0.5")
    assert environment["NO_PROXY"] == "internal,127.0.0.1,localhost,::1,10.0.0.5"
    assert environment["no_proxy"] == "127.0.0.1,localhost,::1,10.0.0.5"
