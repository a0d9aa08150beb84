"""`eagle3-serve extract`. Errors propagate; `cli.py` reports them."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3_serve.cli_layers import parse_layers
from eagle3_serve.core.errors import ConfigError, InterruptedLoadError, PartialResultError, TerminatedLoadError
from eagle3_serve.core.reporter import Reporter, make_reporter
from eagle3_serve.core.units import bytes_text
from eagle3_serve.verify_cli import ConfigOption, SetOption

if TYPE_CHECKING:
    from eagle3_serve.drafting.extract.estimate import Estimate
    from eagle3_serve.drafting.extract.job import Options
    from eagle3_serve.drafting.extract.run import Summary
    from eagle3_serve.drafting.extract.servers import Sampling
    from eagle3_serve.drafting.stacks import ConfigSource

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
# Of transformers' apply_chat_template; anything else goes to the template.
# fmt: off
_SET_BY_EXTRACT = frozenset((
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
    "messages", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize",
    "tokenizer_kwargs", "tools", "truncation",
))
# fmt: on


def extract(
    *,
    inputs: Annotated[
        list[Path],
        typer.Option(
            "--input",
            metavar="FILE",
            help="JSON lines of messages, text or token ids, or a plain text file; repeatable.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The store to write.", show_default=False)],
    config: ConfigOption = None,
    sets: SetOption = None,
    url: Annotated[
        str | None,
        typer.Option(
            "--url", show_default=False, help="Gateway of a running server whose tap.mode is store; starts nothing."
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            metavar="LAYERS",
            show_default=False,
            help="Whose outputs to store, as 2,30,58 (zero-based; -1: the embedding). Without it: those of the "
            "configuration's drafter.",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option("--max-length", min=2, show_default=False, help="Tokens of a sample at most; the rest is cut."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, show_default=False, help="Use only the first N conversations.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="SIZE", show_default=False, help="Stop before the store is larger: 500G."),
    ] = None,
    regenerate: Annotated[
        bool,
        typer.Option("--regenerate", help="Let the target write the answers anew, so the drafter learns its words."),
    ] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="With --regenerate: tokens of an answer at most.")
    ] = 1024,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, help="With --regenerate: 0 answers greedily.")
    ] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0, max=1, help="With --regenerate: nucleus sampling.")] = 1.0,
    seed: Annotated[
        int,
        typer.Option(
            "--seed",
            min=0,
            help="With --regenerate and a temperature; heeded by an engine with enable-deterministic-inference.",
        ),
    ] = 0,
    template_args: Annotated[
        str | None,
        typer.Option(
            "--template-args",
            metavar="JSON",
            show_default=False,
            help="What the chat template is told besides, as SGLang's chat_template_kwargs: '{\"thinking\": false}'.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="How states are stored: bfloat16, float16 or float32.")
    ] = "bfloat16",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a store that was begun before.")] = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say how many bytes, files and hours it takes, and run nothing.")
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", min=0.001, show_default=False, help="With --estimate: tokens/s, instead of the last run's."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line on standard output.")] = False,
) -> None:
    """Write the hidden states that a drafter learns from: text in, a store of samples out.

    Conversations go through the target's own chat template; the loss mask marks what the target writes. The engine is
    started for it with its tap storing, or a running one is asked. A run that was stopped goes on with --resume.

    Exit code 21: some samples were left out, and are listed in skipped.jsonl; 24: the disk is full.

    Example: `eagle3-serve extract --config configs/kimi.yaml --input chats.jsonl --out /data/states --regenerate`
    """
    from eagle3_serve.drafting.extract.job import Options  # noqa: PLC0415 - a second of imports
    from eagle3_serve.drafting.extract.servers import Sampling  # noqa: PLC0415
    from eagle3_serve.drafting.stacks import ConfigSource  # noqa: PLC0415

    options = Options(
        inputs=tuple(dict.fromkeys(path.absolute() for path in inputs)),
        out=out,
        layers=parse_layers(layers, "--layers") if layers is not None else None,
        max_length=max_length,
        limit=limit,
        max_bytes=None if max_bytes is None else _size(max_bytes),
        sampling=_sampling(Sampling(max_tokens, temperature, top_p, seed), regenerate=regenerate),
        template_args=_template_args(template_args),
        dtype=_known_dtype(dtype),
        resume=resume,
    )
    _require_files(options.inputs)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file", remedy="name a directory that is empty or not there yet")
    if rate is not None and not (estimate and math.isfinite(rate)):
        raise ConfigError("--rate is a number for --estimate", remedy="leave it out, or add --estimate")
    source = ConfigSource(config, sets=sets or (), environ=os.environ)
    with make_reporter(as_json=as_json) as reporter:
        if estimate:
            _estimate(url, source, options, rate, reporter, as_json=as_json)
            return
        _extract(url, source, options, reporter, as_json=as_json)


def _extract(url: str | None, source: ConfigSource, options: Options, reporter: Reporter, *, as_json: bool) -> None:
    from eagle3_serve.drafting.extract.run import extract_attached, extract_started  # noqa: PLC0415
    from eagle3_serve.drafting.stacks import run_until_done  # noqa: PLC0415

    try:
        summary = run_until_done(
            lambda: (
                extract_attached(url, source, options, reporter)
                if url is not None
                else extract_started(source, options, reporter)
            )
        )
    except (InterruptedLoadError, TerminatedLoadError) as error:
        raise type(error)(error.message, remedy="to go on: the same command with --resume") from None
    reporter.event("extracted", _in_words(summary, options), **summary.as_dict())
    if summary.skipped or summary.stopped_by:
        raise PartialResultError(_what_is_missing(summary), remedy=_remedy(summary, options))


def _estimate(
    url: str | None, source: ConfigSource, options: Options, rate: float | None, reporter: Reporter, *, as_json: bool
) -> None:
    from eagle3_serve.drafting.extract.estimate import estimate  # noqa: PLC0415
    from eagle3_serve.drafting.extract.job import prepare  # noqa: PLC0415
    from eagle3_serve.drafting.extract.run import attached_job, load_template  # noqa: PLC0415
    from eagle3_serve.drafting.stacks import run_until_done  # noqa: PLC0415

    if url is not None:
        job = run_until_done(lambda: attached_job(url, source, options, reporter))
    else:
        job = prepare(source.resolve().config, options)
    template = load_template(job)
    found = run_until_done(lambda: estimate(job, template, reporter, rate=rate, attached=url is not None))
    if as_json:
        typer.echo(json.dumps({"event": "estimate", **found.as_dict(), "row_bytes": job.row_bytes}))
        return
    typer.echo(_estimate_in_words(found, job.states, job.hidden_size, options.dtype))


def _estimate_in_words(found: Estimate, states: int, hidden: int, dtype: str) -> str:
    lines = [
        f"samples     {found.samples:,}",
        f"tokens      {found.tokens:,}, of which {found.trained_tokens:,} are trained on",
        f"bytes       {found.bytes:,} ({bytes_text(found.bytes)}): {states} states of {hidden} in {dtype} a token",
        f"files       {found.files:,}",
        f"free there  {bytes_text(found.free_bytes)}" + ("" if found.fits else ": IT DOES NOT FIT (see --max-bytes)"),
    ]
    if found.most_tokens is not None:
        lines.insert(2, f"            up to {found.most_tokens:,} tokens, if every answer takes all of --max-tokens")
    if found.stopped_by:
        lines.append(f"stopped by  {found.stopped_by}: the text goes on")
    lines += _time_in_words(found)
    lines += [f"rejected    {count:,}: {reason}" for reason, count in found.rejected.most_common()]
    return "\n".join(lines)


def _time_in_words(found: Estimate) -> list[str]:
    if found.hours_at is None:
        return [f"time        {_duration(found.hours or 0)} at {found.rate:,.0f} tokens/s, {found.rate_source}"]
    assumed = ", ".join(f"{_duration(hours)} at {rate:,}" for rate, hours in found.hours_at.items())
    return [
        f"time        not known; assuming a speed: {assumed} tokens/s",
        "            (a first extraction of a minute tells, with --regenerate one of 300 samples; or give --rate)",
    ]


def _duration(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"


def _in_words(summary: Summary, options: Options) -> str:
    before = f" ({summary.already_there:,} were there already)" if summary.already_there else ""
    return (
        f"{options.out}: {summary.samples:,} samples{before}, {summary.tokens:,} tokens, {summary.trained_tokens:,} of "
        f"them trained on, {bytes_text(summary.bytes)}; {summary.seconds:.1f} s, {summary.tokens_per_s:,.0f} tokens/s"
    )


def _what_is_missing(summary: Summary) -> str:
    said = [f"{count:,} left out: {reason}" for reason, count in summary.skipped.most_common(5)]
    more = len(summary.skipped) - len(said)
    said += [f"and {more} more reasons"] if more > 0 else []
    return "; ".join([*([f"stopped by {summary.stopped_by}"] if summary.stopped_by else []), *said])


def _remedy(summary: Summary, options: Options) -> str:
    if summary.stopped_by:
        return "what was written is a whole store; for more of the text: a larger --max-bytes, and --resume"
    return f"the store is whole without them; {options.out / 'skipped.jsonl'} lists each"


def _require_files(inputs: tuple[Path, ...]) -> None:
    for path in inputs:
        if not path.is_file():
            what = f"{path} is a directory" if path.is_dir() else f"there is no file {path}"
            raise ConfigError(what, remedy="name a file with --input; it may be given several times")


def _sampling(wanted: Sampling, *, regenerate: bool) -> Sampling | None:
    """What was asked for, if it makes sense together. Raises ConfigError."""
    if not regenerate and wanted != type(wanted)():
        raise ConfigError(
            "--max-tokens, --temperature, --top-p and --seed say how the target answers, and it is not asked to",
            remedy="add --regenerate, or leave them out",
        )
    if not (math.isfinite(wanted.temperature) and wanted.top_p > 0):  # not every typer refuses "nan"
        raise ConfigError(
            f"nothing can be sampled with --temperature {wanted.temperature} and --top-p {wanted.top_p}",
            remedy="a temperature from 0 on, and a top-p above 0, 1 at most",
        )
    return wanted if regenerate else None


def _template_args(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--template-args is not valid JSON: {error}", remedy="such as '{\"thinking\": false}'"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError("--template-args is no JSON object", remedy="such as '{\"thinking\": false}'")
    if taken := sorted(_SET_BY_EXTRACT & set(value)):
        raise ConfigError(f"--template-args has {taken[0]}, which extraction sets itself", remedy="leave it out")
    return value


def _known_dtype(name: str) -> str:
    known = ("bfloat16", "float16", "float32")
    if name not in known:
        raise ConfigError(f"--dtype {name} is not known", remedy=f"one of {', '.join(known)}")
    return name


def _size(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip().upper())
    size = int(float(found[1]) * _UNITS[found[2]]) if found is not None and found[2] in _UNITS else 0
    if not size:
        raise ConfigError(f"--max-bytes {text} is no size", remedy="such as 500G, 1.5T or 200Mi")
    return size
