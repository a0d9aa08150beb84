"""Which of SGLang's arguments the configuration owns, so that `engine.extra_args` cannot set them a second time."""

from __future__ import annotations

# Argument (long name, no dashes) -> the configuration key that sets it. Aliases of SGLang's parser are listed too.
_OWNERS: dict[str, str] = {
    "model-path": "target.path",
    "model": "target.path",
    "served-model-name": "target.served_name",
    "trust-remote-code": "target.trust_remote_code",
    "quantization": "target.quantization",
    "speculative-algorithm": "drafter.algorithm",
    "speculative-draft-model-path": "drafter.path",
    "speculative-draft-model": "drafter.path",
    "speculative-num-steps": "drafter.num_steps",
    "speculative-eagle-topk": "drafter.topk",
    "speculative-num-draft-tokens": "drafter.num_draft_tokens",
    "speculative-draft-attention-backend": "drafter.attention_backend",
    "device": "engine.device",
    "host": "engine.host",
    "port": "engine.port",
    "tp-size": "engine.tp_size",
    "tensor-parallel-size": "engine.tp_size",
    "dtype": "engine.dtype",
    "kv-cache-dtype": "engine.kv_cache_dtype",
    "attention-backend": "engine.attention_backend",
    "mem-fraction-static": "engine.mem_fraction_static",
    "context-length": "engine.context_length",
    "max-running-requests": "engine.max_running_requests",
    "max-total-tokens": "engine.max_total_tokens",
    "chunked-prefill-size": "engine.chunked_prefill_size",
    "page-size": "engine.page_size",
    "disable-radix-cache": "engine.prefix_cache",
    "disable-cuda-graph": "engine.cuda_graph.enabled",
    "cuda-graph-backend-decode": "engine.cuda_graph.enabled",
    "disable-decode-cuda-graph": "engine.cuda_graph.enabled",
    "cuda-graph-max-bs": "engine.cuda_graph.max_batch_size",
    "cuda-graph-max-bs-decode": "engine.cuda_graph.max_batch_size",
    "reasoning-parser": "engine.reasoning_parser",
    "tool-call-parser": "engine.tool_call_parser",
    "enable-metrics": "the launcher (the gateway's /metrics needs it)",
    "api-key": "gateway.api_key (the engine listens behind the gateway)",
    "admin-api-key": "gateway.admin_key (the engine listens behind the gateway)",
}

_SHORTEST_ABBREVIATION = 2  # --tp


def argument_name(name: str) -> str:
    """SGLang's argument as its parser knows it: dashes, none of them leading."""
    return name.lstrip("-").replace("_", "-")


def owner_of_argument(name: str) -> str | None:
    """The configuration key that owns SGLang's argument `name`, or None.

    Dashes or underscores, with or without leading dashes. An abbreviation of an owned argument counts as that
    argument, because SGLang's parser (argparse) accepts unambiguous abbreviations.
    """
    argument = argument_name(name.strip()).partition("=")[0]
    if argument in _OWNERS:
        return _OWNERS[argument]
    if len(argument) < _SHORTEST_ABBREVIATION:
        return None
    owners = {owner for owned, owner in _OWNERS.items() if owned.startswith(argument)}
    return owners.pop() if len(owners) == 1 else None


def owned_arguments() -> dict[str, str]:
    """A copy of the whole table, for documentation and tests."""
    return dict(_OWNERS)
