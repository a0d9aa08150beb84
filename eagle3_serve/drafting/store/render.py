"""A report for people: colours on a terminal, brackets elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from eagle3_serve.core.units import bytes_text
from eagle3_serve.drafting.store.alignment import SHIFTS, Alignment
from eagle3_serve.drafting.store.inspect import Report, Shown
from eagle3_serve.drafting.verify.table import table

_TRAINED, _CONTEXT = "bold green", "dim"
_CUT_CHARACTERS = 600
_MOST_SKIPPED = 10
_MOST_SAMPLES = 5


def show(report: Report, console: Console, *, whole: bool) -> None:
    """Print it all. `whole`: samples are not cut."""
    for line in _head(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    colours = console.color_system is not None and not console.no_color
    for shown in report.shown:
        console.print(sample_text(shown, colours=colours, whole=whole), soft_wrap=True)
    for line in _end(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def sample_text(shown: Shown, *, colours: bool, whole: bool) -> Text:
    """One sample: trained tokens coloured, or in ⟦brackets⟧."""
    entry = shown.entry
    text = Text(f"\nrow {entry.row}, {entry.id}: {entry.tokens} tokens, {entry.trained} trained\n")
    left = _CUT_CHARACTERS
    for span in shown.spans:
        words = span.text if whole or len(span.text) <= left else span.text[:left] + "…"
        marked = f"⟦{words}⟧" if span.trained and not colours else words
        text.append(marked, style=_TRAINED if span.trained else _CONTEXT)
        left -= len(span.text)
        if left <= 0 and not whole:
            break
    return text


def _head(report: Report) -> Iterator[str]:
    store, identity = report.store, report.store.identity
    state = "complete" if store.complete else "NOT complete"
    yield f"{store.directory}: {state}"
    yield (
        f"  samples     {len(store):,} ({len(store.skipped):,} skipped), {store.tokens:,} tokens, {report.trained:,} "
        f"trained ({report.trained / max(1, store.tokens):.0%})"
    )
    yield f"  size        {bytes_text(report.bytes)}, {report.bytes / max(1, store.tokens):,.0f} bytes a token"
    yield (
        f"  states      outputs of layers {', '.join(map(str, identity.layers))} and the last ({identity.last_layer}), "
        f"before the final norm; {identity.hidden_size} x {identity.dtype}"
    )
    yield f"  target      {identity.target}, vocabulary {identity.vocab_size:,}"
    yield f"  tokenizer   {identity.tokenizer}, chat template {identity.chat_template or 'none'}"
    yield f"  taken by    {f'SGLang {identity.sglang}' if identity.sglang else 'another program'}" + (
        f", overlay {identity.overlay}" if identity.overlay else ""
    )
    yield from _pairs("settings", store.settings)
    yield from _pairs("about", store.about)
    for each in store.skipped[:_MOST_SKIPPED]:
        yield f"  skipped     {each.id} ({each.where}): {each.reason}"
    if len(store.skipped) > _MOST_SKIPPED:
        yield f"  skipped     {len(store.skipped) - _MOST_SKIPPED} more, in skipped.jsonl"
    yield f"\n{len(report.looked_into)} of {len(store)} samples looked into, in {report.seconds:.1f} s"
    if report.statistics:
        yield _statistics(report)
    yield ""
    yield from _alignment(report)


def _pairs(title: str, values: Mapping[str, Any]) -> Iterator[str]:
    for number, (key, value) in enumerate(values.items()):
        words = value if isinstance(value, str) else json.dumps(value)
        yield f"  {title if number == 0 else '':<10}  {key}: {words}"


def _statistics(report: Report) -> str:
    head = ["state", "mean norm", "smallest", "largest", "deviation", "dead dims", "not finite", "zero", "repeated"]
    rows = [
        [
            each.name,
            *(f"{number:.4g}" for number in (each.mean_norm, each.smallest_norm, each.largest_norm, each.deviation)),
            *(f"{number:,}" for number in (each.dead, each.not_finite, each.zero, each.repeated)),
        ]
        for each in report.statistics
    ]
    if report.alignment:
        head += ["predicts", "resembles"]
        for row, state in zip(rows, report.alignment.states, strict=True):
            row += [f"{state.score:.2f}", "" if state.resemblance is None else f"{state.resemblance:.2f}"]
    return table(head, rows)


def _alignment(report: Report) -> Iterator[str]:
    yield f"alignment: {report.verdict}"
    if (found := report.alignment) is None:
        return
    yield _by_shift(found)
    worst = sorted(found.samples, key=lambda sample: -sample.surprise)[:_MOST_SAMPLES]
    yield "samples whose tokens surprise the head most, in nats beyond what it expects (all: --json):"
    for sample in worst:
        yield f"  row {sample.row:<8} {sample.surprise:+.2f}, at {sample.score:.2f} a token"


def _by_shift(found: Alignment) -> str:
    rows = [("last state: log-probability of token t+s", *(f"{score:.2f}" for score in found.head.scores))]
    if found.first:
        rows.append(("first state: cosine with its embedding", *(f"{score:.3f}" for score in found.first.scores)))
    return table((f"{found.head.positions} positions, s =", *(f"{shift:+d}" for shift in SHIFTS)), rows)


def _end(report: Report) -> Iterator[str]:
    yield ""
    for note in report.notes:
        yield f"note: {note}"
    for fault in report.faults:
        yield f"FAULT: {fault}"
        yield f"  what to do: {fault.remedy}"
    if not report.faults:
        yield report.conclusion
