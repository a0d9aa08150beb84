"""One sample of a store, and what makes it one that can be trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eagle3_serve.drafting.extract.provenance import Identity

if TYPE_CHECKING:
    import torch


class SampleError(ValueError):
    """A sample that must not be trained on; the text says why."""


@dataclass(frozen=True)
class Sample:
    """`token_ids` [T] int64, `loss_mask` [T] uint8 (1: the drafter learns to predict this token), `states`
    [T, K + 1, H]."""

    id: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: torch.Tensor


def check_sample(sample: Sample, identity: Identity) -> None:
    """Raise SampleError for what does not belong into a store of `identity`, or must not be trained on."""
    tokens = len(sample.token_ids)
    wanted = (tokens, identity.states, identity.hidden_size)
    if tuple(sample.states.shape) != wanted:
        raise SampleError(
            f"the states are {list(sample.states.shape)}, not {list(wanted)}: tokens, states, hidden size"
        )
    if tuple(sample.loss_mask.shape) != (tokens,):
        raise SampleError(f"{tokens} tokens have a loss mask of {list(sample.loss_mask.shape)}")
    if tokens == 0 or not bool(sample.loss_mask.any()):
        raise SampleError("no token of it is trained on: its loss mask is all zero")
    if int(sample.token_ids.min()) < 0 or int(sample.token_ids.max()) >= identity.vocab_size:
        raise SampleError(f"a token id is outside the target's vocabulary of {identity.vocab_size}")
    # As they will be stored: a value that bfloat16 or float16 cannot hold is infinite there.
    states = sample.states.to(torch_dtype(identity.dtype))
    # NaN goes through to both ends; several times as fast as isfinite.
    if not all(end.isfinite() for end in states.aminmax()):
        token, state = (int(each) for each in (~states.isfinite()).any(dim=-1).nonzero()[0])
        place = f"the first at token {token}, state {state}"
        if bool(sample.states[token, state].isfinite().all()):
            raise SampleError(f"its states hold values that {identity.dtype} cannot, {place}")
        raise SampleError(f"its states hold NaN or infinite values, {place}")


def torch_dtype(name: str) -> Any:
    """torch's own of a name such as "bfloat16"."""
    import torch  # noqa: PLC0415

    return getattr(torch, name)
