"""The configuration: frozen models that know nothing of files, flags or the environment (`resolve.py` does).

Sizes are in tokens unless the name says otherwise; times in seconds; a path is relative to the file that names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from eagle3_serve.config.sglang_arguments import argument_name, owner_of_argument

Port = Annotated[int, Field(ge=0, le=65535)]
ArgumentValue = bool | int | float | str | tuple[int | float | str, ...] | None


_PREFILL_GRAPHS = "prefills in CUDA graphs, whose rows the tap does not see"
_SEVERAL_ENGINES = "other requests on other ranks, and the tap takes the ranks for one"
# Arguments of SGLang with which the tap's rows would be missing or another's, and what they bring.
_NOT_UNDER_THE_TAP = {
    "cuda-graph-config": _PREFILL_GRAPHS,
    "enable-piecewise-cuda-graph": _PREFILL_GRAPHS,
    "enforce-piecewise-cuda-graph": _PREFILL_GRAPHS,
    "enable-breakable-cuda-graph": _PREFILL_GRAPHS,
    "enable-mixed-chunk": "decode steps into prefills, so that a stored sequence would have gaps",
    "enable-dp-attention": _SEVERAL_ENGINES,
    "dp-size": _SEVERAL_ENGINES,
    "data-parallel-size": _SEVERAL_ENGINES,
    "pp-size": "pipeline stages, and the tap asks the first ranks, which are not the last stage",
    "pipeline-parallel-size": "pipeline stages, and the tap asks the first ranks, which are not the last stage",
}


class Frozen(BaseModel):
    """Base of every section: immutable, unknown keys are errors, defaults are checked too."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)


class TargetConfig(Frozen):
    """The model that is served."""

    path: Path = Field(description="Directory of the target's checkpoint")
    served_name: str = Field(
        default="kimi", min_length=1, description="Model name that clients send and /v1/models lists"
    )
    trust_remote_code: bool = Field(
        default=False,
        description="Let transformers run code that lies in the checkpoint (Kimi's tokenizer needs it)",
    )
    quantization: str | None = Field(
        default=None, description="SGLang quantization method; null: what the checkpoint's config.json says"
    )


class DrafterConfig(Frozen):
    """The EAGLE-3 drafter and the shape of its draft."""

    enabled: bool = Field(default=True, description="false serves the target alone: the baseline")
    path: Path = Field(description="Directory of the drafter's checkpoint")
    algorithm: Literal["EAGLE3"] = Field(
        default="EAGLE3",
        description="EAGLE would load the same checkpoint and silently accept nothing, so it cannot be chosen",
    )
    num_steps: int = Field(default=3, ge=1, description="Draft steps per verify step")
    topk: int = Field(default=1, ge=1, description="Branches per draft step; 1 is a chain")
    num_draft_tokens: int = Field(
        default=4, ge=2, description="Draft tokens per verify step, the root (the last accepted token) included"
    )
    attention_backend: str | None = Field(
        default=None,
        description="The drafter's own attention backend; a Llama-type drafter cannot run on an MLA-only one",
    )

    @model_validator(mode="after")
    def _draft_fits_its_tree(self) -> Self:
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"a chain (topk 1) of {self.num_steps} steps verifies num_steps + 1 = {self.num_steps + 1} tokens, "
                f"but num_draft_tokens is {self.num_draft_tokens}"
            )
        nodes = 1 + self.topk + (self.num_steps - 1) * self.topk**2
        if self.num_draft_tokens > nodes:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}, but {self.num_steps} steps of topk {self.topk} "
                f"propose at most {nodes} tokens"
            )
        return self


class AuxLayersConfig(Frozen):
    """Which target layers' hidden states the drafter receives, in the terms of `core/contract.py`."""

    layers: tuple[int, ...] | None = Field(
        default=None,
        description="Layer ids in the spelling named by `convention`; null: the drafter's config.json decides",
    )
    convention: Literal["auto", "contract", "input", "sglang-0.5.9", "sglang-0.5.16+"] = Field(
        default="auto",
        description="What an id k means. contract: the residual stream after layer k (-1: the embedding). "
        "input: what enters layer k. sglang-*: what that release captures for the list. auto: as the drafter "
        "declares it, and an error where that is ambiguous",
    )


class CudaGraphConfig(Frozen):
    """CUDA graphs for decode and verify."""

    enabled: bool = Field(default=True, description="Capture decode and verify steps as CUDA graphs")
    max_batch_size: int | None = Field(
        default=None, ge=1, description="Largest batch captured; every size costs memory and start-up time"
    )


class EngineConfig(Frozen):
    """How SGLang runs. Everything not named here passes through `extra_args`."""

    device: Literal["cuda", "cpu"] = Field(default="cuda", description="cpu: the embedded CPU engine")
    release: str | None = Field(
        default=None,
        description="SGLang release this file was written for; another one installed is an error",
    )
    python: Path | None = Field(
        default=None, description="Python that has SGLang; null: the one that runs eagle3-serve"
    )
    host: str = Field(default="127.0.0.1", description="Address of the engine's own HTTP server, behind the gateway")
    port: Port = Field(default=0, description="Its port; 0 takes a free one")
    tp_size: int = Field(default=1, ge=1, description="Tensor parallel ranks")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="Weights and activations"
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = Field(
        default="auto", description="KV cache element type"
    )
    attention_backend: str | None = Field(default=None, description="Target attention backend; null: SGLang's choice")
    mem_fraction_static: float | None = Field(
        default=None, gt=0, lt=1, description="Part of GPU memory for weights and KV cache"
    )
    context_length: int | None = Field(default=None, ge=1, description="Longest prompt plus answer, in tokens")
    max_running_requests: int | None = Field(default=None, ge=1, description="Requests decoded at once")
    max_total_tokens: int | None = Field(default=None, ge=1, description="KV cache capacity in tokens")
    chunked_prefill_size: int | None = Field(default=None, ge=1, description="Longest prefill piece, in tokens")
    page_size: int = Field(default=1, ge=1, description="Tokens per KV page")
    prefix_cache: bool = Field(default=True, description="Reuse the KV cache of shared prefixes")
    cuda_graph: CudaGraphConfig = CudaGraphConfig()
    reasoning_parser: str | None = Field(
        default=None, description="SGLang parser that splits reasoning from the answer"
    )
    tool_call_parser: str | None = Field(default=None, description="SGLang parser for tool calls")
    start_timeout_s: float = Field(default=1800, gt=0, description="From start to the first answered health check")
    stop_grace_s: float = Field(default=15, ge=0, description="Between SIGTERM and SIGKILL to the process group")
    environment: dict[str, str] = Field(
        default_factory=dict, repr=False, description="Environment variables for the engine's processes (NCCL_*, ...)"
    )
    extra_args: dict[str, ArgumentValue] = Field(
        default_factory=dict,
        repr=False,
        description="Further SGLang arguments, without leading dashes; true gives a bare flag, a list several values",
    )

    @field_validator("extra_args")
    @classmethod
    def _arguments_without_another_owner(cls, value: dict[str, ArgumentValue]) -> dict[str, ArgumentValue]:
        for name in value:
            if owner := owner_of_argument(name):
                raise ValueError(f"--{name.lstrip('-')} is set by {owner}: change it there")
        return value

    @model_validator(mode="after")
    def _what_the_cpu_engine_has(self) -> Self:
        if self.device == "cpu" and self.page_size != 1:
            raise ValueError(f"the CPU engine has pages of one token, and page_size is {self.page_size}")
        if self.device == "cpu" and self.attention_backend is not None:
            raise ValueError("the CPU engine brings its own attention backend: leave attention_backend out")
        return self

    @field_validator("environment")
    @classmethod
    def _no_internal_variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name.startswith("EAGLE3_SERVE_") or name == "PYTHONPATH":
                raise ValueError(f"{name} is set by eagle3-serve itself")
        return value


class TapConfig(Frozen):
    """A look at the hidden states inside the engine; off, nothing of it runs."""

    mode: Literal["off", "probe", "store"] = Field(
        default="off",
        description="probe: keep the last rows that the target captured and the drafter received, for "
        "`verify wiring` (CUDA graphs stay on). store: keep whole prefilled sequences by request, for extraction "
        "(turns the prefix cache off)",
    )
    layers: Literal["aux", "all"] = Field(
        default="aux",
        description="aux: the drafter's layers (and the last one, in store mode). all: every layer and the embedding, "
        "of which the drafter still gets its own",
    )
    rows: int = Field(
        default=1024,
        ge=16,
        description="Token rows kept in probe mode for each of target and drafter. A row of the real Kimi's three "
        "states takes 43 KB of GPU memory",
    )


class GatewayConfig(Frozen):
    """The OpenAI-compatible HTTP front."""

    host: str = Field(default="127.0.0.1", description="Address to listen on")
    port: Port = Field(default=30080, description="Port to listen on; 0 takes a free one")
    api_key: SecretStr | None = Field(
        default=None, description="Key that applications must send; better by environment or api_key_file"
    )
    api_key_file: Path | None = Field(default=None, description="File that holds it")
    admin_key: SecretStr | None = Field(default=None, description="Key for /internal/*; without one they are off")
    admin_key_file: Path | None = Field(default=None, description="File that holds it")
    drain_grace_s: float = Field(default=30, ge=0, description="Time for running requests after SIGTERM")
    keepalive_s: float = Field(
        default=15,
        gt=0,
        description="A stream that is silent this long gets a comment line, so that proxies keep it open",
    )
    ready_timeout_s: float = Field(
        default=5, gt=0, description="Longest wait for the engine in one /ready check, which takes SGLang about 1 s"
    )
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024, description="Largest request body")

    @model_validator(mode="after")
    def _one_source_per_key(self) -> Self:
        for name in ("api_key", "admin_key"):
            if getattr(self, name) is not None and getattr(self, f"{name}_file") is not None:
                raise ValueError(f"{name} and {name}_file are both set: keep one")
        return self


class PathsConfig(Frozen):
    """Where files go."""

    run_dir: Path = Field(
        default=Path("~/.local/state/eagle3-serve"),
        description="One directory a launch: run.yaml, logs, reports",
    )
    cache_dir: Path = Field(
        default=Path("~/.cache/eagle3-serve"),
        description="Overlays (SGLang with the patches), and how fast extractions were",
    )


class Config(Frozen):
    """Everything one launch needs."""

    target: TargetConfig
    drafter: DrafterConfig
    aux_layers: AuxLayersConfig = AuxLayersConfig()
    engine: EngineConfig = EngineConfig()
    tap: TapConfig = TapConfig()
    gateway: GatewayConfig = GatewayConfig()
    paths: PathsConfig = PathsConfig()

    @model_validator(mode="after")
    def _nothing_under_the_tap_that_mixes_its_rows(self) -> Self:
        given = {argument_name(name): value for name, value in self.engine.extra_args.items()}
        for name, value in given.items():
            brought = _NOT_UNDER_THE_TAP.get(name)
            if self.tap.mode != "off" and brought and (value is True or value not in (None, False, 1)):
                raise ValueError(
                    f"tap.mode is {self.tap.mode}, but engine.extra_args has {name}, which may bring {brought}"
                )
        backend = given.get("cuda-graph-backend-prefill", "disabled")
        if self.tap.mode != "off" and backend != "disabled":
            raise ValueError(
                f"tap.mode is {self.tap.mode}, which needs prefills outside CUDA graphs, but engine.extra_args has "
                f"cuda-graph-backend-prefill: {backend}"
            )
        return self
