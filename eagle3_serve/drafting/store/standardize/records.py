"""One sample as it was found: token ids, loss mask and states, under whatever names and in whatever nesting.

Nothing is judged here but what cannot be read; `checks` judges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3_serve.drafting.extract.store import SampleError
from eagle3_serve.drafting.store.standardize.files import some
from eagle3_serve.drafting.store.standardize.layers import layer_number

IDS = ("input_ids", "token_ids", "tokens")
MASKS = ("loss_mask", "assistant_mask", "labels")
STATES = ("hidden_states", "all_hidden_states", "hidden_state_list")
LAST = (
    "last_hidden_state",
    "last_hidden_states",
    "hidden_state_last",
    "target_last_hidden_states",  # SpecForge's DSpark
    "verifier_last_hidden_states",  # speculators, in memory
    "last",
)
_IGNORED_LABEL = -100
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Record:
    """`ids` [T], `mask` [T] (0 or 1; None: not stored), `states`: a list of [T, H] or by number in the name; `last`
    [T, H]: the last layer's state where it is stored apart. `notes`: what had to be read into it."""

    ids: torch.Tensor
    mask: torch.Tensor | None
    states: Sequence[torch.Tensor] | Mapping[int, torch.Tensor]
    last: torch.Tensor | None = None
    notes: tuple[str, ...] = field(default=())


def read_ids(content: Mapping[Any, Any]) -> torch.Tensor:
    """[T] int64. Raises SampleError where there are none, or two that differ."""
    found = {name: _flat(content[name], name) for name in IDS if content.get(name) is not None}
    if not found:
        raise SampleError(f"no token ids: none of {', '.join(IDS)} among {some(content)}")
    first = next(iter(found.values()))
    for name, ids in found.items():
        if ids.is_floating_point() or ids.dtype is torch.bool:
            raise SampleError(f"{name} is {_dtype(ids)}, not whole numbers")
        if not torch.equal(ids, first):
            raise SampleError(f"{' and '.join(found)} differ")
    return first.long()


def read_mask(content: Mapping[Any, Any]) -> torch.Tensor | None:
    """[T] uint8, or None where none is stored. Raises SampleError for values other than 0 and 1."""
    name = next((name for name in MASKS if content.get(name) is not None), None)
    if name is None:
        return None
    values = _flat(content[name], name)
    if name == "labels":
        return (values != _IGNORED_LABEL).to(torch.uint8)
    if not bool(((values == 0) | (values == 1)).all()):
        raise SampleError(f"{name} has other values than 0 and 1")
    return values.to(torch.uint8)


def unpadded(record: Record, attention: torch.Tensor | None) -> Record:
    """Without the positions that an attention mask [T] says are padding. Raises SampleError where it has holes."""
    if attention is None or len(attention) != len(record.ids) or bool(attention.bool().all()):
        return record
    kept = attention.bool().nonzero().flatten()
    if not len(kept) or int(kept[-1] - kept[0]) + 1 != len(kept):
        raise SampleError("its attention_mask hides positions between others, so it is not one sequence")
    part = slice(int(kept[0]), int(kept[-1]) + 1)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[part] if len(tensor) == len(attention) else tensor

    named = isinstance(record.states, Mapping)
    return Record(
        ids=record.ids[part],
        mask=None if record.mask is None else cut(record.mask),
        states={key: cut(state) for key, state in record.states.items()}  # type: ignore[union-attr]
        if named
        else [cut(state) for state in record.states],  # type: ignore[arg-type]
        last=None if record.last is None else cut(record.last),
        notes=(*record.notes, "positions that attention_mask calls padding were removed"),
    )


def attention_of(content: Mapping[Any, Any]) -> torch.Tensor | None:
    found = content.get("attention_mask")
    return _flat(found, "attention_mask") if isinstance(found, torch.Tensor) else None


def read_last(content: Mapping[Any, Any]) -> torch.Tensor | None:
    """The last layer's state where it has a tensor of its own."""
    name = next((name for name in LAST if isinstance(content.get(name), torch.Tensor)), None)
    return None if name is None else one_state(content[name], name)


def one_state(tensor: Any, name: str) -> torch.Tensor:
    """[T, H] of [T, H] or [1, T, H]. Raises SampleError."""
    if not isinstance(tensor, torch.Tensor):
        raise SampleError(f"{name} is a {type(tensor).__name__}, not a tensor")
    _require_float(tensor, name)
    if tensor.dim() == 3 and tensor.shape[0] == 1:
        return tensor[0]
    if tensor.dim() == 3:
        raise SampleError(f"{name} is {list(tensor.shape)}: a batch of {tensor.shape[0]}, and a file holds one sample")
    if tensor.dim() != 2:
        raise SampleError(f"{name} is {list(tensor.shape)}, not [tokens, hidden size]")
    return tensor


def states_of(value: Any, name: str, *, tokens: int, hidden_size: int, token_first: bool = False) -> list[torch.Tensor]:
    """A list of [T, H] from a list of per-layer tensors, a stack of them, or one tensor [T, n x H].

    `token_first`: a stack is known to be [T, n, H]; else its axes are told by their sizes. Raises SampleError.
    """
    if isinstance(value, (list, tuple)):
        return [one_state(state, f"{name}[{index}]") for index, state in enumerate(value)]
    if not isinstance(value, torch.Tensor):
        raise SampleError(f"{name} is a {type(value).__name__}, not a list of tensors or a tensor")
    _require_float(value, name)
    stack = value
    while stack.dim() > 3 or (stack.dim() == 3 and stack.shape[-1] != hidden_size):
        if 1 not in stack.shape[:2]:
            break
        stack = stack.squeeze(0) if stack.shape[0] == 1 else stack.squeeze(1)
    if stack.dim() == 3 and stack.shape[-1] == hidden_size:
        return list(stack.unbind(1)) if token_first else _unstacked(stack, name, tokens)
    if stack.dim() == 2 and stack.shape[1] % hidden_size == 0:
        return list(torch.split(stack, hidden_size, dim=1))
    raise SampleError(f"{name} is {list(value.shape)}; the target's hidden size is {hidden_size}")


def named_states(content: Mapping[Any, Any]) -> dict[int, torch.Tensor]:
    """Tensors with a layer's number in their names. Raises SampleError where two have the same."""
    found: dict[int, torch.Tensor] = {}
    origin: dict[int, str] = {}
    for key, tensor in content.items():
        number = layer_number(str(key)) if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2 else None
        if number is None or str(key) in LAST:
            continue
        if number in found:
            raise SampleError(f"{origin[number]} and {key} are both of layer {number}")
        found[number], origin[number] = one_state(tensor, str(key)), str(key)
    return found


def _unstacked(stack: torch.Tensor, name: str, tokens: int) -> list[torch.Tensor]:
    by_token, by_layer = stack.shape[0] == tokens, stack.shape[1] == tokens
    if by_token and by_layer and tokens > 1:
        raise SampleError(f"{name} is {list(stack.shape)}: which of the two is tokens and which is layers is not told")
    if by_layer:
        return list(stack.unbind(0))
    return list(stack.unbind(1))


def _flat(value: Any, name: str) -> torch.Tensor:
    try:
        tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SampleError(f"{name} is a {type(value).__name__}, not a tensor or a list of numbers") from error
    if tensor.dim() == 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if tensor.dim() != 1:
        raise SampleError(f"{name} is {list(tensor.shape)}, not [tokens]")
    return tensor


def _require_float(tensor: torch.Tensor, name: str) -> None:
    if tensor.dtype not in _FLOATS:
        raise SampleError(f"{name} is {_dtype(tensor)}; states are one of {', '.join(map(_spelled, _FLOATS))}")


def _dtype(tensor: torch.Tensor) -> str:
    return _spelled(tensor.dtype)


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
