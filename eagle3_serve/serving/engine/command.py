"""Config -> SGLang's command line. Pure: no files, no environment, no SGLang."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from eagle3_serve.config.schema import ArgumentValue, Config, DrafterConfig, EngineConfig
from eagle3_serve.config.sglang_arguments import argument_name
from eagle3_serve.core.contract import Resolution
from eagle3_serve.serving.engine.cpu import settings as cpu_settings

# SGLang 0.5.9 has one graph setting; later releases one each for prefill and decode.
_ONE_GRAPH_SETTING = ("0.5.9",)
_PREFILL_GRAPHS = "cuda-graph-backend-prefill"
_OWN_VARIABLES = "EAGLE3_SERVE_"


def engine_command(config: Config, *, python: str, port: int, release: str) -> tuple[str, ...]:
    """The whole argv that starts SGLang for `config` on `port`; `release` decides on spellings."""
    engine = config.engine
    target = config.target
    arguments = ["--model-path", str(target.path), "--served-model-name", target.served_name]
    arguments += ["--host", engine.host, "--port", str(port), "--tp-size", str(engine.tp_size)]
    arguments += ["--dtype", engine.dtype, "--enable-metrics"]
    arguments += _flag("trust-remote-code", target.trust_remote_code)
    arguments += _options(
        {
            "quantization": target.quantization,
            "kv-cache-dtype": None if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype,
            "attention-backend": engine.attention_backend,
            "mem-fraction-static": engine.mem_fraction_static,
            "context-length": engine.context_length,
            "max-running-requests": engine.max_running_requests,
            "max-total-tokens": engine.max_total_tokens,
            "chunked-prefill-size": engine.chunked_prefill_size,
            "page-size": None if engine.device == "cpu" else engine.page_size,
            "reasoning-parser": engine.reasoning_parser,
            "tool-call-parser": engine.tool_call_parser,
        }
    )
    # A cached prefix is not computed, so the store would lack its rows.
    arguments += _flag("disable-radix-cache", not engine.prefix_cache or config.tap.mode == "store")
    arguments += _device_arguments(engine, release)
    arguments += _tap_arguments(config, release)
    if config.drafter.enabled:
        arguments += _drafter_arguments(config.drafter)
    arguments += _extra_arguments(engine.extra_args)
    return (python, "-m", "sglang.launch_server", *arguments)


def _device_arguments(engine: EngineConfig, release: str) -> list[str]:
    if engine.device == "cpu":
        return cpu_settings.engine_arguments()
    arguments = ["--device", "cuda"]
    if not engine.cuda_graph.enabled:
        return [*arguments, "--disable-cuda-graph"]
    if engine.cuda_graph.max_batch_size is not None:
        name = "--cuda-graph-max-bs" if release in _ONE_GRAPH_SETTING else "--cuda-graph-max-bs-decode"
        arguments += [name, str(engine.cuda_graph.max_batch_size)]
    return arguments


def _tap_arguments(config: Config, release: str) -> list[str]:
    """Prefills outside graphs: a padded one has rows that belong to no request, and the store's code would not run."""
    engine = config.engine
    graphs = engine.device == "cuda" and engine.cuda_graph.enabled and release not in _ONE_GRAPH_SETTING
    said = {argument_name(name) for name in engine.extra_args}
    if config.tap.mode == "off" or not graphs or _PREFILL_GRAPHS in said:
        return []
    return [f"--{_PREFILL_GRAPHS}", "disabled"]


def _drafter_arguments(drafter: DrafterConfig) -> list[str]:
    return _options(
        {
            "speculative-algorithm": drafter.algorithm,
            "speculative-draft-model-path": str(drafter.path),
            "speculative-num-steps": drafter.num_steps,
            "speculative-eagle-topk": drafter.topk,
            "speculative-num-draft-tokens": drafter.num_draft_tokens,
            "speculative-draft-attention-backend": drafter.attention_backend,
        }
    )


def _extra_arguments(extra: dict[str, ArgumentValue]) -> list[str]:
    arguments: list[str] = []
    for key, value in extra.items():
        name = argument_name(key)
        if isinstance(value, bool):
            arguments += _flag(name, value)
        elif isinstance(value, tuple):
            arguments += [f"--{name}", *map(str, value)]
        else:
            arguments += _options({name: value})
    return arguments


def _options(values: dict[str, int | float | str | None]) -> list[str]:
    return [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]


def _flag(name: str, present: bool) -> list[str]:
    return [f"--{name}"] if present else []


def engine_environment(
    config: Config,
    *,
    contract: Resolution | None,
    overlay_id: str,
    python_path: Iterable[Path],
    report_dir: Path,
    inherited_python_path: str,
    cores: int,
) -> dict[str, str]:
    """What is added to the environment of the engine's processes.

    `engine.environment` wins over the defaults here, but not over the variables that `runtime/` reads.
    """
    paths = [str(path) for path in python_path]
    environment = {
        # How often, in seconds, SGLang looks whether the client of a queued or unstreamed request is still there.
        "SGLANG_REQUEST_STATE_WAIT_TIMEOUT": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if config.engine.device == "cpu":
        environment |= cpu_settings.engine_environment(config.engine.tp_size, cores)
    environment |= config.engine.environment
    environment |= {
        "EAGLE3_SERVE_DEVICE": config.engine.device,
        "EAGLE3_SERVE_OVERLAY": overlay_id,
        "EAGLE3_SERVE_REPORT_DIR": str(report_dir),
        "PYTHONPATH": ":".join([*paths, *filter(None, [inherited_python_path])]),
    }
    if config.tap.mode != "off":
        environment |= {
            "EAGLE3_SERVE_TAP": config.tap.mode,
            "EAGLE3_SERVE_TAP_LAYERS": config.tap.layers,
            "EAGLE3_SERVE_TAP_ROWS": str(config.tap.rows),
        }
    if contract is not None:
        environment["EAGLE3_SERVE_AUX_LAYERS"] = contract.layers.env_value
        environment["EAGLE3_SERVE_AUX_CONVENTION"] = str(contract.convention)
    return environment


def process_environment(inherited: Mapping[str, str], added: Mapping[str, str], host: str) -> dict[str, str]:
    """The whole environment of the engine: the launcher's own, without its configuration, and `added`.

    The configuration's variables may hold the gateway's keys, which are nothing to code that a checkpoint brings.
    SGLang asks itself over HTTP while it starts, so loopback and `host` never go through a proxy.
    """
    environment = {name: value for name, value in inherited.items() if not name.upper().startswith(_OWN_VARIABLES)}
    environment |= added
    direct = ["127.0.0.1", "localhost", "::1", host]
    for name in ("NO_PROXY", "no_proxy"):
        environment[name] = ",".join([*filter(None, [environment.get(name)]), *direct])
    return environment
