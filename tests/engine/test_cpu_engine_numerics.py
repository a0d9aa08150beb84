"""The whole CPU engine against transformers' DeepseekV3 with the same random weights, float32 on both sides.

The head sizes cannot agree by chance (tiny_checkpoints.HeadSizes), chunks are 64 tokens, and prompts lie around
that size. Two servers, both with a drafter that is right about half the time:

- `chain`: KimiK25ForConditionalGeneration, 61 layers, aux layers [2, 30, 58], topk 1, with the faster forwards;
- `tree`: DeepseekV3ForCausalLM, 6 layers, topk 2 and 6 draft tokens, two ranks over gloo, SGLang's own forwards;

and `plain`, the chain's target without a drafter.

TOLERANCE is for one token's log-probability; seen: 1.2e-5 at most. A deliberate fault's distance is measured in
`test_a_fault_would_be_seen`: 0.01 at the very least for the mildest one tried, so the margin is a hundredfold.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.cpu_server import CpuServer, cpu_server
from tests.support.tiny_checkpoints import TinyTarget, write_random_drafter, write_random_target

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
CHUNK = 64
NEW_TOKENS = 24
PROMPT_LENGTHS = (3, 17, 40, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 150)
CHUNKED = ("--chunked-prefill-size", str(CHUNK))


def random_tokens(length: int, seed: int = 0) -> list[int]:
    """Ids of bytes; the same seed gives the same beginning whatever the length."""
    generator = random.Random(seed)
    return [generator.randrange(7, 263) for _ in range(length)]


PROMPTS = [random_tokens(length, seed) for seed, length in enumerate(PROMPT_LENGTHS)]


class Reference:
    """transformers' model of the target's text part."""

    def __init__(self, target: TinyTarget) -> None:
        self.model = transformers.DeepseekV3ForCausalLM.from_pretrained(target.directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def log_probabilities(self, prompt: list[int], start: int = 0) -> list[float]:
        """Of prompt[start + 1:], as CpuServer.prompt_log_probabilities gives them."""
        logits = self.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        return [float(logits[i - 1, prompt[i]]) for i in range(start + 1, len(prompt))]

    @torch.no_grad()
    def next_tokens(self, prompt: list[int], text: list[int]) -> list[int]:
        """Its own choice for each place of `text`, given what precedes: equal to `text` if that is its greedy text."""
        logits = self.model(torch.tensor([prompt + text[:-1]])).logits[0]
        tokens: list[int] = logits[len(prompt) - 1 :].argmax(-1).tolist()
        return tokens


class Case:
    """A running server and the reference for its target."""

    def __init__(self, server: CpuServer, reference: Reference) -> None:
        self.server, self.reference = server, reference


def checkpoints(directory: Path, architecture: str, layers: int, aux: tuple[int, ...]) -> tuple[Any, Path, Reference]:
    """Target as `architecture`, drafter, and the reference read from a text-only copy with the same weights."""
    options: dict[str, Any] = {"layers": layers, "seed": 3, "dtype": "float32", "bigram": 3.0}
    options["dense_layers"] = layers - 4 if layers > 8 else 3  # several layers of either kind
    target = write_random_target(directory / "target", architecture=architecture, **options)
    copy = write_random_target(directory / "reference", architecture="deepseek", **options)
    drafter = write_random_drafter(directory / "drafter", target, aux_layers=aux)
    return target, drafter, Reference(copy)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Reference]:
    return checkpoints(tmp_path_factory.mktemp("kimi"), "kimi", 61, (2, 30, 58))


@pytest.fixture(scope="module")
def chain(kimi: tuple[Any, Path, Reference], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    target, drafter, reference = kimi
    log = tmp_path_factory.mktemp("chain") / "engine.log"
    with cpu_server(target.directory, log, drafter=drafter, arguments=CHUNKED) as server:
        yield Case(server, reference)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    target, drafter, reference = checkpoints(tmp_path_factory.mktemp("tree"), "deepseek", 6, (2, 3, 4))
    with cpu_server(
        target.directory,
        tmp_path_factory.mktemp("tree-log") / "engine.log",
        drafter=drafter,
        tp_size=2,
        topk=2,
        draft_tokens=6,
        environment={"EAGLE3_SERVE_CPU_LAYERS": "sglang"},
        arguments=CHUNKED,
    ) as server:
        yield Case(server, reference)


@pytest.fixture(params=["chain", "tree"])
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.getfixturevalue(request.param)
    return found


def worst(ours: list[float], reference: list[float]) -> float:
    assert len(ours) == len(reference) > 0
    return max(abs(a - b) for a, b in zip(ours, reference, strict=True))


@pytest.mark.parametrize("length", [2, 20, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 200])
def test_prompt_log_probabilities_are_transformers_own(case: Case, length: int) -> None:
    """Without a cached prefix: one chunk by expanded heads, further chunks by absorbed attention."""
    case.server.forget_cache()
    prompt = random_tokens(length, seed=99)
    ours, cached = case.server.prompt_log_probabilities(prompt)
    assert cached == 0
    assert worst(ours, case.reference.log_probabilities(prompt)) < TOLERANCE


@pytest.mark.parametrize(("known", "length"), [(50, 60), (50, 50 + CHUNK + 9), (130, 260), (1, 30)])
def test_a_cached_prefix_changes_no_log_probability(case: Case, known: int, length: int) -> None:
    case.server.forget_cache()
    prompt = random_tokens(length, seed=7)
    case.server.greedy([prompt[:known]], 1)
    ours, cached = case.server.prompt_log_probabilities(prompt, start=known)
    assert cached >= known - 1, "the prefix cache must have been used, or the test shows nothing"
    assert worst(ours, case.reference.log_probabilities(prompt, start=known)) < TOLERANCE


def test_greedy_text_is_transformers_own_one_by_one_and_batched(case: Case) -> None:
    case.server.forget_cache()
    alone = [case.server.greedy([prompt], NEW_TOKENS)[0]["output_ids"] for prompt in PROMPTS]
    assert all(len(text) == NEW_TOKENS for text in alone)
    assert [case.reference.next_tokens(*pair) for pair in zip(PROMPTS, alone, strict=True)] == alone
    case.server.forget_cache()
    assert [answer["output_ids"] for answer in case.server.greedy(PROMPTS, NEW_TOKENS)] == alone


def test_drafts_are_accepted_and_rejected(case: Case) -> None:
    """Otherwise equal texts would say nothing about accepting: cache moves, links and bonus tokens."""
    answers = case.server.greedy(PROMPTS, NEW_TOKENS)
    steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    accept_length = NEW_TOKENS * len(PROMPTS) / steps
    assert 1.3 < accept_length < 3.5


def test_text_is_the_same_without_a_drafter(
    chain: Case, kimi: tuple[Any, Path, Reference], tmp_path_factory: pytest.TempPathFactory
) -> None:
    with_drafter = chain.server.greedy(PROMPTS, NEW_TOKENS)
    log = tmp_path_factory.mktemp("plain") / "engine.log"
    with cpu_server(kimi[0].directory, log, arguments=CHUNKED) as plain:
        without = plain.greedy(PROMPTS, NEW_TOKENS)
    assert [a["output_ids"] for a in with_drafter] == [a["output_ids"] for a in without]


def test_the_faster_forwards_were_in_use_where_expected(chain: Case, tree: Case) -> None:
    log = chain.server.log.read_text(errors="replace")
    assert "'DeepseekV2AttentionMLA': 61" in log
    assert "'DeepseekV2DecoderLayer': 57" in log
    assert "faster forwards" not in tree.server.log.read_text(errors="replace")


def test_a_fault_would_be_seen(kimi: tuple[Any, Path, Reference]) -> None:
    """The distances that two mistakes make: a prefix not attended to, and two heads' values exchanged in one layer."""
    reference = kimi[2]
    prompt = random_tokens(120, seed=7)
    right = reference.log_probabilities(prompt, start=60)
    without_prefix = reference.log_probabilities(prompt[60:])
    assert worst(without_prefix, right) > 100 * TOLERANCE
    weight = reference.model.model.layers[30].self_attn.kv_b_proj.weight
    original = weight.detach().clone()
    heads = weight.data.view(4, -1, weight.shape[1])
    heads[[0, 1], 24:] = heads[[1, 0], 24:].clone()
    try:
        exchanged = reference.log_probabilities(prompt, start=60)
    finally:
        weight.data.copy_(original)
    assert worst(exchanged, right) > 100 * TOLERANCE
