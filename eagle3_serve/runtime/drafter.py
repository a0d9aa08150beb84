"""What the patched `LlamaForCausalLMEagle3.load_weights` checks: fc's width, d2t, and that no tensor is dropped.

SGLang skips a tensor whose name it does not know and leaves a parameter that no tensor fills as it was allocated;
both give a drafter that serves, and whose drafts are rejected. Here both are errors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_serve.core.draft_vocab import check_d2t
from eagle3_serve.core.errors import CheckpointError, ContractError
from eagle3_serve.runtime import report

if TYPE_CHECKING:
    import torch

_CHECKED = "eagle3_serve_drafter_checked"
_SHARDS: dict[object, set[object]] = {"q": {"q", "k", "v"}, 0: {0, 1}}
# What makes a drafter an EAGLE-3.1 one: key in its config -> attribute of a LlamaModel that understands it.
_VARIANTS = {
    "fc_norm": "fc_norm",
    "use_aux_norm": "fc_norm",
    "norm_output": "norm_output",
    "norm_before_fc": "norm_before_fc",
}
# Constants that older checkpoints store and every model computes by itself.
_CARRY_NOTHING = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class DrafterLoad:
    """One load of a drafter's weights, watched.

    `model`: a LlamaForCausalLMEagle3 before its weights are loaded. Only the first load is checked: later ones are
    weight updates and may be partial. Raises ContractError if the drafter is of a kind that this release ignores.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._checks = not getattr(model, _CHECKED, False)
        if self._checks:
            check_variants(model)
        self._name = ""
        self._unused: list[str] = []
        self._count = 0
        self._filled: dict[str, set[object]] = {}
        self._maps: dict[str, torch.Tensor] = {}

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand the tensors on one by one. Raises ContractError at an fc of the wrong width, before it is loaded."""
        for name, tensor in weights:
            self._name = name
            self._count += 1
            kind = next((kind for kind in ("d2t", "t2d") if kind in name), None)
            if kind:
                self._maps[kind] = tensor
            elif not name.endswith(_CARRY_NOTHING):
                self._unused.append(name)
            if self._checks and name.split(".")[-2:] == ["fc", "weight"]:
                check_fc(self._model, tuple(tensor.shape))
            yield name, tensor

    def used(self, parameter: str, shard: object = None) -> None:
        """The current tensor went into `parameter`; `shard`: which part of a stacked one (q, k, v; 0, 1)."""
        if self._unused and self._unused[-1] == self._name:
            self._unused.pop()
        self._filled.setdefault(parameter, set()).add(shard)

    def finish(self) -> None:
        """After the last tensor. Raises CheckpointError for dropped or missing tensors and for a wrong d2t."""
        if not self._checks:
            return
        self._check_unused()
        self._check_missing()
        self._check_vocabulary()
        setattr(self._model, _CHECKED, True)
        self._write_report()

    def _check_unused(self) -> None:
        if self._unused:
            raise CheckpointError(
                f"the drafter's checkpoint has tensors that {type(self._model).__name__} has no place for and SGLang "
                f"would drop: {_listed(self._unused)}",
                remedy="for fc_norm.* and aux_norm_* set fc_norm, for input_norm.* norm_before_fc in the drafter's "
                "config.json; otherwise convert the checkpoint to SGLang's names",
            )

    def _check_missing(self) -> None:
        missing = []
        for name in dict(self._model.named_parameters()):
            filled = self._filled.get(name, set())
            wanted = next((_SHARDS[shard] for shard in filled if shard in _SHARDS), filled)
            if name.endswith(".weight") and (not filled or filled != wanted) and not self._from_target(name):
                missing.append(name)
        if missing:
            raise CheckpointError(
                f"the drafter's checkpoint does not fill {_listed(missing)}",
                remedy="check that all its shards are there and that their names are SGLang's",
            )

    def _from_target(self, name: str) -> bool:
        """SGLang takes the embedding from the target if the widths are equal, and lm_head if there is no small one."""
        config = self._model.config
        if name.endswith("embed_tokens.weight"):
            return getattr(config, "target_hidden_size", config.hidden_size) in (None, config.hidden_size)
        return name.endswith("lm_head.weight") and bool(self._model.load_lm_head_from_target)

    def _check_vocabulary(self) -> None:
        config = self._model.config
        d2t, t2d = (self._maps.get(kind) for kind in ("d2t", "t2d"))
        check_d2t(
            None if d2t is None else d2t.tolist(),
            draft_vocab=int(config.draft_vocab_size or config.vocab_size),
            target_vocab=int(config.vocab_size),
            t2d=None if t2d is None else t2d.tolist(),
        )

    def _write_report(self) -> None:
        inner = self._model.model
        contract = report.configured_layers()
        content = report.identity(self._model) | {
            "layers": None if contract is None else list(contract.outputs),
            "states": _states(inner),
            "target_hidden_size": int(inner.hidden_size_in),
            "fc_shape": list(inner.fc.weight.shape),
            "fc_norm": getattr(inner, "fc_norm", None) is not None,
            "norm_before_fc": getattr(inner, "input_norm", None) is not None,
            "norm_output": bool(getattr(inner, "norm_output", False)),
            "draft_vocab_size": int(self._model.config.draft_vocab_size or self._model.config.vocab_size),
            "tensors": self._count,
        }
        report.write("drafter", content)


def check_variants(model: Any) -> None:
    """That this release's LlamaModel understands what the drafter's config asks for; some have no tensor that would
    show it, and 0.5.9 knows none of them. Raises ContractError."""
    config, inner = model.config, model.model
    nested = getattr(config, "eagle_config", None) or {}
    asked = [key for key in _VARIANTS if getattr(config, key, None) or nested.get(key)]
    ignored = [key for key in asked if not hasattr(inner, _VARIANTS[key])]
    states = getattr(config, "num_aux_hidden_states", None) or _states(inner)
    if not hasattr(inner, "num_aux_hidden_states") and states != _states(inner):
        ignored.append(f"num_aux_hidden_states {states}")
    if ignored:
        raise ContractError(
            f"the drafter's config asks for {', '.join(ignored)}, which {type(inner).__name__} of this SGLang release "
            "does not have and would ignore",
            remedy="serve this drafter with SGLang 0.5.23",
        )


def _states(inner: Any) -> int:
    """How many hidden states a LlamaModel's fc takes; 0.5.9 always builds three and does not say so."""
    return int(getattr(inner, "num_aux_hidden_states", 3))


def check_fc(model: Any, shape: tuple[int, ...]) -> None:
    """That fc takes what the contract feeds it: `shape` is that of the checkpoint's fc.weight, [out, in].

    in = number of states x the target's hidden size. Nothing is checked without a contract. Raises ContractError.
    """
    contract = report.configured_layers()
    if contract is None:
        return
    inner = model.model
    hidden = _target_hidden_size() or int(inner.hidden_size_in)
    fed = len(contract) * hidden
    built = int(inner.fc.weight.shape[1])
    if not shape[1] == built == fed:
        raise ContractError(
            f"the drafter's fc.weight is {list(shape)}, so it takes {shape[1]} values; its config makes an fc of "
            f"{_states(inner)} states x {inner.hidden_size_in} = {built}; and {contract} of the target, "
            f"{len(contract)} states x {hidden} = {fed}, are fed",
            remedy="name as many layers in aux_layers as the drafter was trained on, and check target_hidden_size and "
            "num_aux_hidden_states in its config.json",
        )
    if fed == int(model.config.hidden_size):
        raise ContractError(
            f"{contract} make {fed} values, which is also the drafter's own hidden size: SGLang would take them for "
            "its recurrent state and skip fc",
            remedy="SGLang cannot serve this drafter",
        )


def _target_hidden_size() -> int | None:
    """The target's hidden size as this very process reported it when it built the target, if it did."""
    directory = os.environ.get(report.REPORT_DIR)
    if not directory:
        return None
    path = Path(directory) / f"capture-rank{report.rank()}.json"
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return int(content["hidden_size"]) if content["pid"] == os.getpid() else None


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
