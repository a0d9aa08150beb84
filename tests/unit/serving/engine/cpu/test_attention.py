"""Attention against a naive float64 reference: one query, one head at a time."""

from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from eagle3_serve.serving.engine.cpu import attention  # noqa: E402
from eagle3_serve.serving.engine.cpu.latent_attention import BatchPlan, additive_mask, attend, own_slots  # noqa: E402


@dataclass
class Batch:
    """Random requests in random slots: `prefix` cached and `news` new tokens each."""

    prefix: list[int]
    news: list[int]
    key_heads: int = 2
    group: int = 3
    width: int = 12
    value_width: int = 7
    seed: int = 0
    scale: float = 0.3
    tensors: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        rows, tokens = len(self.prefix), sum(self.news)
        columns = max(p + n for p, n in zip(self.prefix, self.news, strict=True)) + 2
        slots = torch.randperm(rows * columns) + 1
        self.tensors = {
            "q": torch.randn(tokens, self.key_heads * self.group, self.width),
            "k": torch.randn(tokens, self.key_heads, self.width),
            "v": torch.randn(tokens, self.key_heads, self.value_width),
            "key_pool": torch.randn(rows * columns + 1, self.key_heads, self.width),
            "value_pool": torch.randn(rows * columns + 1, self.key_heads, self.value_width),
            "req_to_token": slots.view(rows, columns).int(),
            "rows": torch.randperm(rows),
            "lens": torch.tensor(self.prefix) + torch.tensor(self.news),
        }

    def extend(self, *, logit_cap: float = 0.0, window: int = 0, **options: Any) -> Any:
        t, news = self.tensors, torch.tensor(self.news, dtype=torch.int32)
        k, v = options.pop("k", t["k"]), options.pop("v", t["v"])
        output = torch.full((t["q"].shape[0], t["q"].shape[1], self.value_width), float("nan"))
        scales = options.pop("scales", (1.0, 1.0))
        cross = options.pop("cross", False)
        attention.extend_attention(
            t["q"],
            k,
            v,
            output,
            t["key_pool"],
            t["value_pool"],
            *scales,
            t["req_to_token"],
            t["rows"],
            t["lens"],
            news,
            news.cumsum(0) - news,
            max(self.news),
            self.scale,
            logit_cap,
            cross,
            window,
            None,
            **options,
        )
        return output

    def reference(
        self,
        *,
        logit_cap: float = 0.0,
        window: int = 0,
        sinks: Any = None,
        tree_mask: Any = None,
        is_causal: bool = True,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> Any:
        t = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in self.tensors.items()}
        rows, start, offset = [], 0, 0
        for request, (prefix, new) in enumerate(zip(self.prefix, self.news, strict=True)):
            slots = t["req_to_token"][t["rows"][request], :prefix].long()
            keys = torch.cat([t["key_pool"][slots] * scales[0], t["k"][start : start + new]])
            values = torch.cat([t["value_pool"][slots] * scales[1], t["v"][start : start + new]])
            for i in range(new):
                visible = [is_causal is False or position <= prefix + i for position in range(prefix + new)]
                if window:
                    visible = [seen and prefix + i - p < window for p, seen in enumerate(visible)]
                if tree_mask is not None:
                    among_new = tree_mask[offset + i * new : offset + (i + 1) * new].tolist()
                    visible = [True] * prefix + among_new
                keys_seen, values_seen = keys[torch.tensor(visible)], values[torch.tensor(visible)]
                rows.append(self._one_query(t["q"][start + i], keys_seen, values_seen, logit_cap, sinks))
            start, offset = start + new, offset + new * new
        return torch.stack(rows)

    def _one_query(self, q: Any, keys: Any, values: Any, logit_cap: float, sinks: Any) -> Any:
        heads = []
        for head in range(q.shape[0]):
            scores = keys[:, head // self.group] @ q[head] * self.scale
            if logit_cap:
                scores = logit_cap * torch.tanh(scores / logit_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            weights = torch.softmax(scores, 0)[: len(keys)]
            heads.append(weights @ values[:, head // self.group])
        return torch.stack(heads)


def distance(ours: Any, reference: Any) -> float:
    return float((ours.double() - reference).abs().max())


LENGTHS = [
    ([0], [1]),
    ([0], [9]),
    ([17], [4]),
    ([3, 11, 0], [4, 4, 4]),
    ([5, 0, 8, 2], [1, 7, 3, 6]),
    ([0, 0], [5, 2]),
    ([21, 1], [1, 1]),
]


@pytest.mark.parametrize(("prefix", "news"), LENGTHS)
@pytest.mark.parametrize("options", [{}, {"logit_cap": 2.0}, {"window": 3}, {"window": 30}], ids=str)
def test_new_tokens_attend_to_their_prefix_and_to_those_before(
    prefix: list[int], news: list[int], options: dict[str, Any]
) -> None:
    batch = Batch(prefix, news, seed=len(prefix))
    assert distance(batch.extend(**options), batch.reference(**options)) < 1e-6


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("group", [1, 5])
def test_query_heads_share_key_heads(key_heads: int, group: int) -> None:
    batch = Batch([6, 2], [3, 3], key_heads=key_heads, group=group)
    assert distance(batch.extend(), batch.reference()) < 1e-6


@pytest.mark.parametrize(("prefix", "news"), [([7], [6]), ([3, 11, 0], [6, 6, 6]), ([0, 40], [3, 3])])
def test_a_token_tree_replaces_causal_order_among_new_tokens(prefix: list[int], news: list[int]) -> None:
    batch = Batch(prefix, news, seed=3)
    n = news[0]
    mask = ((torch.rand(len(news), n, n) < 0.4) | torch.eye(n, dtype=torch.bool)).flatten()
    ours = batch.extend(tree_mask=mask)
    assert distance(ours, batch.reference(tree_mask=mask)) < 1e-6
    assert distance(ours, batch.reference()) > 0.01, "the mask must have made a difference"


def test_sinks_take_weight_and_give_no_value() -> None:
    batch = Batch([4, 2], [3, 5], seed=5)
    sinks = torch.randn(6)
    ours = batch.extend(sinks=sinks)
    assert distance(ours, batch.reference(sinks=sinks)) < 1e-6
    assert distance(ours, batch.reference()) > 0.01


def test_without_causal_order_new_tokens_see_each_other() -> None:
    batch = Batch([4], [5])
    assert distance(batch.extend(is_causal=False), batch.reference(is_causal=False)) < 1e-6


def test_scales_belong_to_the_cache_alone() -> None:
    batch = Batch([4, 3], [2, 2])
    assert distance(batch.extend(scales=(0.5, 3.0)), batch.reference(scales=(0.5, 3.0))) < 1e-6


def test_a_long_prompt_is_worked_off_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch([5, 0], [23, 17], seed=9)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)
    assert distance(batch.extend(), batch.reference()) < 1e-6


def test_new_tokens_are_never_read_from_the_cache() -> None:
    """MLA's prefill: the cache holds the latent form, and its shape agrees by chance."""
    batch = Batch([0, 0], [5, 3])
    before = batch.extend()
    batch.tensors["key_pool"].fill_(float("nan"))
    batch.tensors["value_pool"].fill_(float("nan"))
    assert torch.equal(batch.extend(), before)


@pytest.mark.parametrize("news", [[4], [4, 4], [4, 4, 4], [4, 2]])
def test_prompts_with_nothing_cached_do_not_care_about_the_caches_form(news: list[int]) -> None:
    """Expanded heads in a first prefill, while MLA's cache holds the latent form: prompts of equal length too."""
    batch = Batch([0] * len(news), news)
    expected = batch.reference()
    slots = batch.tensors["key_pool"].shape[0]
    batch.tensors["key_pool"], batch.tensors["value_pool"] = torch.randn(slots, 1, 20), torch.randn(slots, 1, 16)
    torch.testing.assert_close(batch.extend().double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("news", [[4], [2, 2]])
def test_a_prefix_in_another_form_than_the_new_tokens_is_refused(news: list[int]) -> None:
    batch = Batch([3] * len(news), news)
    batch.tensors["key_pool"] = batch.tensors["key_pool"][:, :1]
    with pytest.raises(NotImplementedError, match="cached prefix in form"):
        batch.extend()


@pytest.mark.parametrize(("prefix", "news"), [([6], [3]), ([6, 2, 0], [3, 3, 3]), ([1, 5], [4, 2])])
def test_a_layer_that_shares_a_cache_reads_all_of_it_there(prefix: list[int], news: list[int]) -> None:
    batch = Batch(prefix, news, seed=11)
    t, start = batch.tensors, 0
    for row, length, new in zip(t["rows"], t["lens"], news, strict=True):
        slots = t["req_to_token"][row, length - new : length].long()
        t["key_pool"][slots], t["value_pool"][slots] = t["k"][start : start + new], t["v"][start : start + new]
        start += new
    assert distance(batch.extend(k=None, v=None), batch.reference()) < 1e-6


@pytest.mark.parametrize(
    "options", [{"cross": True}, {"window": 4, "tree_mask": torch.ones(9)}, {"tree_mask": torch.ones(12)}], ids=str
)
def test_what_is_not_supported_says_so(options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError):
        Batch([1], [3]).extend(**options)


@pytest.mark.parametrize("lens", [[1], [9], [4, 17, 1, 8]])
@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("writes", [True, False])
def test_decoding_writes_its_token_and_attends_to_all_of_its_own(lens: list[int], window: int, writes: bool) -> None:
    batch = Batch([length - 1 for length in lens], [1] * len(lens), seed=len(lens))
    t = batch.tensors
    loc = t["req_to_token"][t["rows"], t["lens"] - 1].long()
    expected = batch.reference(window=window)
    if not writes:
        t["key_pool"][loc], t["value_pool"][loc] = t["k"], t["v"]
    output = torch.full((len(lens), 6, batch.value_width), float("nan"))
    attention.decode_attention(
        t["q"],
        t["key_pool"],
        t["value_pool"],
        1.0,
        1.0,
        output,
        t["k"] if writes else None,
        t["v"] if writes else None,
        loc,
        torch.zeros(0),
        t["req_to_token"],
        t["rows"],
        t["lens"],
        batch.scale,
        0.0,
        False,
        window,
        None,
    )
    assert distance(output, expected) < 1e-6
    assert torch.equal(t["key_pool"][loc], t["k"])


def test_an_older_sglang_calls_without_scales() -> None:
    received: list[tuple[Any, ...]] = []
    call = attention.with_default_scales(lambda *arguments: received.append(arguments), 2)
    table = torch.zeros(1)
    call("q", "pool", table, "rest")
    call("q", "pool", 0.5, 0.25, table, "rest")
    assert received == [("q", "pool", 1.0, 1.0, table, "rest"), ("q", "pool", 0.5, 0.25, table, "rest")]


@pytest.mark.parametrize(
    ("prefix", "n", "tree"),
    [([5], 4, False), ([5, 0, 13], 4, False), ([9, 2], 6, True), ([7], 1, False), ([3, 8], 1, False)],
)
def test_latent_attention_over_one_plan_is_the_general_attention(prefix: list[int], n: int, tree: bool) -> None:
    """MLA's short path: one latent head whose values are the first part of its keys."""
    rank, rope, heads = 8, 4, 3
    batch = Batch(prefix, [n] * len(prefix), key_heads=1, group=heads, width=rank + rope, value_width=rank)
    t = batch.tensors
    t["value_pool"], t["v"] = t["key_pool"][..., :rank], t["k"][..., :rank]
    mask = ((torch.rand(len(prefix), n, n) < 0.5) | torch.eye(n, dtype=torch.bool)).flatten() if tree else None
    expected = batch.reference(tree_mask=mask)

    columns = torch.arange(n) + (t["lens"] - n)[:, None]
    t["key_pool"][t["req_to_token"].long()[t["rows"][:, None], columns].flatten()] = t["k"]
    longest = int(t["lens"].max())
    table = t["req_to_token"][t["rows"], :longest].long()
    used = {0, *(slot for row, length in zip(table.tolist(), t["lens"].tolist(), strict=True) for slot in row[:length])}
    # What others left in the slots past a request's end must not matter.
    t["key_pool"][[slot for slot in range(len(t["key_pool"])) if slot not in used]] = float("nan")
    slots = own_slots(table, t["lens"]).flatten()
    plan = BatchPlan(
        positions=columns.flatten(),
        rotation=torch.zeros(0),
        slots=slots,
        batch=len(prefix),
        mask=additive_mask(t["lens"], n, heads, longest, mask),
    )
    assert distance(attend(t["q"], t["key_pool"], plan, rank, batch.scale), expected) < 1e-6
