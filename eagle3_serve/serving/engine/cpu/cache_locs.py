"""Slot bookkeeping in `req_to_token` [rows, positions]: which pool slot holds a request's token at a position.

The twins are the Triton kernels beside the call sites in SGLang's kernels/ops/speculative/cache_locs.py and
srt/mem_cache/allocation.py. Outputs are written in place, in the dtype they have.
"""

# ruff: noqa: PLR0917 (SGLang calls these with positions only)
import torch


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """req_to_token[row of request i, start[i]:end[i]] = the next end[i] - start[i] values of `out_cache_loc`."""
    rows, columns = _ragged(req_pool_indices, start, end)
    req_to_token[rows, columns] = out_cache_loc[: rows.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The inverse: pack the slots of positions start[i]:end[i] of every request into `out_cache_loc`."""
    rows, columns = _ragged(req_pool_indices, start, end)
    out_cache_loc[: rows.numel()] = req_to_token[rows, columns].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """The topk * num_steps slots after each request's tokens, packed into `out_cache_loc`."""
    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.long()[:, None], columns]
    out_cache_loc[: slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def build_draft_decode_metadata(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> torch.Tensor:
    """A `req_to_token` for draft decoding: one row a (request, branch), its prefix and then its own draft slots.

    Branch t's draft tokens lie at positions seq_len + t * num_steps onwards of the request's row. The result
    [B * topk, longest prefix + num_steps] is only as wide as it is used; its readers take the stride from it.
    """
    width = int(seq_lens.max()) + num_steps
    position = torch.arange(width)
    lens = seq_lens.long()[:, None, None]
    shift = torch.arange(topk)[:, None] * num_steps
    columns = torch.where(position < lens, position, position + shift)
    columns = columns.clamp(max=req_to_token.shape[1] - 1)  # only columns past a row's own end are cut
    return req_to_token[req_pool_indices.long()[:, None, None], columns].view(-1, width)


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted draft tokens (`accept_index` >= 0) to the front, in order."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)


def _ragged(rows: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each element of the ranges start[i]:end[i], concatenated."""
    lengths = (end - start).long()
    offsets = lengths.cumsum(0) - lengths
    columns = torch.repeat_interleave(start.long() - offsets, lengths)
    columns = columns + torch.arange(columns.numel())
    return torch.repeat_interleave(rows.long(), lengths), columns
