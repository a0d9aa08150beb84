"""`eagle3-serve verify wiring`: does the drafter get the hidden states it was trained on?

prompts or store -> requests to a server whose tap is on -> rows of known tokens -> reference -> comparison -> report
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from eagle3_serve.config.schema import Config
from eagle3_serve.core.checkpoint_files import read_config, text_config
from eagle3_serve.core.client import Messages
from eagle3_serve.core.contract import EMBEDDING, DrafterIds, known_convention
from eagle3_serve.core.errors import CheckpointError, ConfigError, ContractError, EngineRequestError
from eagle3_serve.core.reporter import Reporter
from eagle3_serve.drafting.stacks import ConfigSource, Server, attached, config_of, started
from eagle3_serve.drafting.verify.evidence import Capture, Evidence, gather
from eagle3_serve.drafting.verify.explain import Settings
from eagle3_serve.drafting.verify.prompts import PromptSet, local_tokenizer
from eagle3_serve.drafting.verify.reference import StoredRow, TargetModel, read_store
from eagle3_serve.drafting.verify.states import Reference
from eagle3_serve.drafting.verify.tap_client import TappedServer
from eagle3_serve.drafting.verify.wiring_report import WiringReport, judge

_SMALL_CHUNK = 512
_LEAST_PROMPT = 8
_LEAST_ROWS = 8  # fewer rows show little
_CONFIGURED = "the server's configuration alone"
_NOT_PROVEN = (
    "nothing here says what the drafter was trained on: it is shown that the engine delivers what was configured, and "
    "--store or --trained-on would show the rest"
)


@dataclass(frozen=True)
class Question:
    """What to compare. `prompts`: None with a store; `trained_on`: the operator's word, by contract, in the drafter's
    order; `limit`: prompts or samples at most; `max_tokens`: of each answer, so that decode steps are seen."""

    prompts: PromptSet | None
    store: Path | None
    trained_on: tuple[int, ...] | None
    limit: int
    max_tokens: int


@dataclass(frozen=True)
class TrainedOn:
    """The layers, by contract and in the drafter's order, and who says so."""

    layers: tuple[int, ...]
    source: str


@dataclass(frozen=True)
class Work:
    """What is sent and what it is compared with, all checked before a server is asked for anything. `trained`: None
    where nobody but the server's configuration says it."""

    question: Question
    config: Config
    drafter: DrafterIds
    prompts: Sequence[tuple[int, ...]]
    trained: TrainedOn | None = None
    model: TargetModel | None = None
    stored: Sequence[StoredRow] = ()
    warnings: Sequence[str] = field(default_factory=list)


async def verify_started(source: ConfigSource, question: Question, reporter: Reporter) -> WiringReport:
    """Start the stack with its tap on, ask, take it down again, compare. Raises what `launch` raises."""
    overrides = ["drafter.enabled=true", "tap.mode=probe"]
    chunk = source.resolve().config.engine.chunked_prefill_size or _SMALL_CHUNK
    if question.store is not None:  # to recognise what the store holds; many layers of few tokens at a time
        overrides += ["tap.layers=all", f"engine.chunked_prefill_size={min(chunk, _SMALL_CHUNK)}"]
    resolved = source.resolve(*overrides)
    work = prepare(resolved.config, question)
    async with started(resolved, reporter, "with the tap") as server:
        contract = server.plan.contract if server.plan else None
        captures = await ask(server, work, reporter)
    layers = contract.layers.outputs if contract else None
    return await conclude(captures, work, layers, reporter)


async def verify_attached(url: str, source: ConfigSource, question: Question, reporter: Reporter) -> WiringReport:
    """Ask a running gateway of `eagle3-serve launch`. `source`: for the admin key, and for the checkpoints unless the
    server's own run.yaml can be read here. Raises EngineRequestError."""
    server = await attached(url, source.resolve().secrets)
    async with TappedServer(server) as tapped:
        info = await tapped.info()
    config = config_of(info, source)
    layers = info.get("layers")
    if not layers:
        raise EngineRequestError(f"{url} serves no drafter", remedy="start it with drafter.enabled: true")
    work = prepare(config, question)
    captures = await ask(server, work, reporter)
    return await conclude(captures, work, tuple(layers), reporter)


def prepare(config: Config, question: Question) -> Work:
    """Token ids of all prompts, none longer than the ring can hold beside its answer.

    Raises ConfigError, ContractError, and CheckpointError for a target that transformers cannot run here.
    """
    most = config.tap.rows - question.max_tokens * config.drafter.num_draft_tokens
    if config.engine.context_length:
        most = min(most, config.engine.context_length - question.max_tokens - config.drafter.num_draft_tokens)
    if most < _LEAST_PROMPT:
        raise ConfigError(
            f"a ring of {config.tap.rows} rows has no place for a prompt beside an answer of {question.max_tokens} "
            f"tokens, {config.drafter.num_draft_tokens} rows each",
            remedy="raise tap.rows, or lower --max-tokens",
        )
    drafter = DrafterIds.from_config(read_config(config.drafter.path))
    trained = trained_on(question, drafter, config.target.path)
    if question.store is not None:
        stored, warnings = read_store(question.store, limit=question.limit, most_tokens=most)
        _require_fit(stored, drafter.states, text_config(read_config(config.target.path)).get("hidden_size"))
        prompts = [row.tokens for row in stored]
        return Work(question, config, drafter, prompts, trained, stored=stored, warnings=warnings)
    model = TargetModel.check(config.target.path)
    conversations = question.prompts.prompts if question.prompts is not None else ()
    prompts = [ids[:most] for ids in _tokenized(config, conversations[: question.limit])]
    return Work(question, config, drafter, prompts, trained, model)


def _require_fit(stored: Sequence[StoredRow], states: int, hidden: object) -> None:
    """Raise ConfigError for a store of another target, or with fewer states a token than the drafter takes."""
    for row in stored:
        _, have, width = row.states.shape
        if have < states or width != hidden:
            raise ConfigError(
                f"the store's row {row.row} has {have} states of {width} values a token; the drafter takes {states} of "
                f"the target's {hidden}",
                remedy="--store is to be of this very target and drafter",
            )


def _tokenized(config: Config, conversations: Sequence[Messages]) -> list[tuple[int, ...]]:
    target = config.target
    try:
        tokenize = local_tokenizer(target.path, trust_remote_code=target.trust_remote_code)
        return [tuple(tokenize(messages)) for messages in conversations]
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise CheckpointError(
            f"the tokenizer of {target.path} cannot be used: {type(error).__name__}: {error}",
            remedy="complete the download; a tokenizer that brings code needs target.trust_remote_code: true",
        ) from error


async def ask(server: Server, work: Work, reporter: Reporter) -> list[Capture]:
    """Send the prompts in rounds that the ring can hold, and read it after each. Raises EngineRequestError."""
    max_tokens = work.question.max_tokens
    each = max_tokens * work.config.drafter.num_draft_tokens
    rounds = in_rounds([len(prompt) + each for prompt in work.prompts], work.config.tap.rows)
    captures: list[Capture] = []
    begun = time.monotonic()
    async with TappedServer(server) as tapped:
        clock = (await tapped.snapshots())[0].clock
        for number, members in enumerate(rounds, start=1):
            reporter.stage(f"round {number} of {len(rounds)}: {len(members)} prompts", time.monotonic() - begun)
            prompts = [work.prompts[member] for member in members]
            captures.append(await tapped.capture(prompts, max_tokens, clock))
            clock = captures[-1].snapshots[0].clock
    return captures


def in_rounds(costs: Sequence[int], rows: int) -> list[list[int]]:
    """Indices in order, as many a round as fit into `rows`; one that is too long alone still gets a round."""
    rounds: list[list[int]] = []
    left = 0
    for index, cost in enumerate(costs):
        if not rounds or cost > left:
            rounds.append([])
            left = rows
        rounds[-1].append(index)
        left -= cost
    return rounds


async def conclude(
    captures: Sequence[Capture], work: Work, contract: tuple[int, ...] | None, reporter: Reporter
) -> WiringReport:
    """Reference and comparison. `contract`: the layers that the server was told. Raises EngineRequestError where there
    are too few rows, ConfigError where the two cannot be compared at all."""
    evidence = gather(captures)
    _require_rows(evidence, work)
    reporter.stage("the reference and the comparison", 0)
    reference = await asyncio.to_thread(_reference, work, evidence)
    trained = work.trained or TrainedOn(contract or evidence.fed_layers, _CONFIGURED)
    told = work.config.aux_layers
    settings = Settings(told.layers, told.convention, work.drafter.ids, work.config.tap.rows)
    ranks = max(snapshot.tp_size for snapshot in captures[0].snapshots)
    try:
        return judge(
            evidence,
            reference,
            None if work.stored else trained.layers,
            trained.source,
            settings,
            tp_size=ranks,
            more_warnings=(*work.warnings, *_contradiction(work), *([] if work.trained else [_NOT_PROVEN])),
        )
    except ValueError as error:
        raise ConfigError(
            f"nothing to compare: {error}", remedy="is the reference of this very target and drafter?"
        ) from error


def _require_rows(evidence: Evidence, work: Work) -> None:
    """A store has rows for prompts alone, so a server that had most of them in its prefix cache shows too little."""
    seen = evidence.prompt_tokens - evidence.unseen
    if work.stored and seen < min(_LEAST_ROWS, evidence.prompt_tokens):
        raise EngineRequestError(
            f"only {seen} of {evidence.prompt_tokens} prompt tokens left a row in the tap: too few to compare",
            remedy="restart the server, or empty its prefix cache (POST /flush_cache of SGLang, while nothing runs), "
            "and let nobody else use it meanwhile",
        )


def trained_on(question: Question, drafter: DrafterIds, target: Path) -> TrainedOn | None:
    """Which layers the drafter was trained on, by the best witness there is; None where there is none.

    `target`: its checkpoint, for the number of layers. Raises ContractError.
    """
    if question.store is not None:
        return TrainedOn((), "the training store itself")
    num_layers = int(text_config(read_config(target))["num_hidden_layers"])
    if question.trained_on is not None:
        outside = [layer for layer in question.trained_on if not EMBEDDING <= layer < num_layers]
        if outside or len(set(question.trained_on)) != drafter.states:
            raise ContractError(
                f"--trained-on {list(question.trained_on)} does not name {drafter.states} layers of the target",
                remedy=f"the drafter takes {drafter.states} states; layers count from 0 to {num_layers - 1}; -1 is the "
                "embedding",
            )
        return TrainedOn(question.trained_on, "--trained-on")
    if drafter.ids and drafter.convention:
        how = f"ids {list(drafter.ids)} in convention '{drafter.convention}'"
        return TrainedOn(drafter.convention.outputs(drafter.ids), f"the drafter's config.json ({how})")
    known = known_convention(drafter.ids, num_layers) if drafter.ids else None
    if drafter.ids and known:
        return TrainedOn(known[0].outputs(drafter.ids), f"the drafter's ids ({known[1]})")
    return None


def _reference(work: Work, evidence: Evidence) -> Reference:
    if work.model is not None:
        return work.model.run(dict(zip(evidence.sent, evidence.tokens, strict=True)))
    rows = ", ".join(str(row.row) for row in work.stored)
    return Reference({number: row.states for number, row in enumerate(work.stored)}, None, f"a store's rows {rows}")


def _contradiction(work: Work) -> list[str]:
    said = work.question.trained_on
    if work.stored and said is not None:
        return [f"--trained-on {list(said)} was not used: the store's own states are the better witness"]
    return []
