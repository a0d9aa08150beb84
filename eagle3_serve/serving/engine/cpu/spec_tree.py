"""Token trees of EAGLE drafts: build one from the drafter's choices, and walk it against the target's.

The twins are the Triton kernels of SGLang's kernels/ops/speculative/spec_tree.py and eagle.py. B requests with n
tree nodes each; node 0 is the last verified token, node i > 0 is the i-th selected draft token.
"""

# ruff: noqa: PLR0917 (SGLang calls these with positions only)
import torch

QLEN_ONLY = 1  # SGLang's TreeMaskMode: n x n values a request, the prefix left out


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor | None,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    n: int,
    mask_mode: int,
) -> None:
    """Fill mask [B * n * n], positions [B * n] and the three [B, n] link tables of each request's tree.

    `selected_index` [B, n - 1] numbers the draft tokens in the order drafted, topk to a parent;
    `parent_list` [B, p] gives the number of each group's parent (group 0 hangs on node 0).
    Missing links are -1; siblings are linked in ascending order.
    """
    if int(mask_mode) != QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {mask_mode}: the CPU engine only has QLEN_ONLY")
    batch = seq_lens.numel()
    parents = _parents(parent_list.view(batch, -1), selected_index[:, : n - 1], topk)
    ancestors = _ancestors(parents, depth)
    if tree_mask is not None:
        tree_mask.view(-1)[: batch * n * n] = ancestors.flatten().to(tree_mask.dtype)
    depths = ancestors.sum(-1) - 1
    positions.view(batch, n).copy_(seq_lens.view(batch, 1) + depths)
    retrieve_index.copy_(torch.arange(batch * n).view(batch, n))
    # children[b, p, i]: node i hangs on node p
    node = torch.arange(n)
    children = parents[:, None] == node[:, None]
    retrieve_next_token.copy_(_first_or_none(children))
    siblings = (parents[:, :, None] == parents[:, None]) & (node > node[:, None]) & (parents >= 0)[:, None]
    retrieve_next_sibling.copy_(_first_or_none(siblings))


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Walk each tree along the target's own choices; argument names are SGLang's.

    `candidates` [B, n] are the drafted tokens, `target_predict` [B, n] the target's choice after each node.
    Writes the accepted nodes' flat numbers to `accept_index` [B, s] (node 0 first), their number without node 0
    to `accept_token_num` [B], and to the flat `predicts` the target's choice after each accepted node.
    """
    batch, n = candidates.shape
    request = torch.arange(batch)
    chosen = target_predict.view(batch, n).long()
    node = torch.zeros(batch, dtype=torch.long)
    accepted = torch.zeros(batch, dtype=torch.long)
    accept_index[:, 0] = retrive_index[:, 0].to(accept_index.dtype)
    predicts_at = retrive_index.long()
    walking = torch.ones(batch, dtype=torch.bool)
    for _ in range(1, accept_index.shape[1]):
        wanted = chosen[request, node]
        child = torch.where(walking, retrive_next_token[request, node].long(), -1)
        searching = (child >= 0) & (candidates[request, child] != wanted)
        while searching.any():
            child = torch.where(searching, retrive_next_sibling[request, child].long(), child)
            searching = (child >= 0) & (candidates[request, child] != wanted)
        walking = child >= 0
        if not walking.any():
            break
        hit = request[walking]
        predicts[predicts_at[hit, node[hit]]] = wanted[hit].to(predicts.dtype)
        node = torch.where(walking, child, node)
        accepted += walking
        accept_index[hit, accepted[hit]] = predicts_at[hit, node[hit]].to(accept_index.dtype)
    accept_token_num.copy_(accepted)
    predicts[predicts_at[request, node]] = chosen[request, node].to(predicts.dtype)


def fill_bonus_tokens(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, stride: int
) -> None:
    """bonus_tokens[i] = request i's last accepted token; `accept_lens` counts the bonus token itself."""
    last = torch.arange(accept_lens.numel()) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def rotate_input_ids(
    input_ids: torch.Tensor,
    extend_start: torch.Tensor,
    extend_lens: torch.Tensor,
    next_ids: torch.Tensor,
    select_index: torch.Tensor | None,
) -> None:
    """Shift each request's tokens one to the left, in place, and put `next_ids[i]` last (or at `select_index[i]`)."""
    for i, (start, length) in enumerate(zip(extend_start.tolist(), extend_lens.tolist(), strict=True)):
        if length == 0:
            continue
        input_ids[start : start + length - 1] = input_ids[start + 1 : start + length].clone()
        input_ids[start + length - 1 if select_index is None else int(select_index[i])] = next_ids[i]


def _parents(parent_list: torch.Tensor, selected_index: torch.Tensor, topk: int) -> torch.Tensor:
    """[B, n]: the node each node hangs on; -1 for node 0 and for a node whose parent was not selected."""
    batch, drafted = selected_index.shape
    group = selected_index.long() // topk
    parents = torch.full((batch, drafted + 1), -1)
    if parent_list.shape[1] == 0:
        parents[:, 1:] = 0
        return parents
    parent_number = parent_list.long().gather(1, group.clamp(max=parent_list.shape[1] - 1))
    is_parent = selected_index[:, None] == parent_number[:, :, None]
    parents[:, 1:] = torch.where(group == 0, 0, _first_or_none(is_parent) + 1)
    parents[:, 1:][(group != 0) & ~is_parent.any(-1)] = -1
    return parents


def _ancestors(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """[B, n, n] booleans: node i sees node j, its ancestor or itself; node 0 is seen by all."""
    batch, n = parents.shape
    sees = torch.zeros(batch, n, n, dtype=torch.bool)
    sees[:, :, 0] = True
    current = torch.arange(n).expand(batch, n)
    for _ in range(depth):
        sees.scatter_(2, current[..., None], True)
        current = parents.gather(1, current).clamp(min=0)
    return sees


def _first_or_none(found: torch.Tensor) -> torch.Tensor:
    """Index of the first true value along the last dimension, -1 where there is none."""
    return torch.where(found.any(-1), found.int().argmax(-1), -1)
