"""What `verify acceptance` found, as text for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3_serve import __version__
from eagle3_serve.drafting.verify.acceptance import Contrast, Question, Report, Wiring, total
from eagle3_serve.drafting.verify.bootstrap import CONFIDENCE, RESAMPLES, Interval
from eagle3_serve.drafting.verify.table import table

_NO_STATES = "not read (tap.mode is off)"


def as_dict(report: Report, question: Question) -> dict[str, Any]:
    """Everything, for `--json`. Intervals are percentile bootstrap intervals over prompts."""
    return {
        "wirings": [_wiring_dict(each) for each in report.wirings],
        "against": [_contrast_dict(each) for each in report.contrasts],
        "confidence": CONFIDENCE,
        "resamples": RESAMPLES,
        "prompts": question.prompts.as_dict(),
        "max_tokens": question.max_tokens,
        "concurrency": question.concurrency,
        "seed": question.seed,
        "eagle3_serve": __version__,
        **report.facts,
    }


def _wiring_dict(wiring: Wiring) -> dict[str, Any]:
    summed, found = total(wiring.answers), wiring.figures
    spread = _spread(wiring)
    return {
        "name": wiring.name,
        "layers": list(wiring.layers) if wiring.layers is not None else None,
        "steps": wiring.steps,
        "accept_length": {"value": found.accept_length, **_ends(spread["length"][0])},
        "accept_rate": {"value": found.accept_rate, **_ends(spread["rate"][0])},
        "positions": [
            {
                "position": number,
                "accepted": {"value": found.reached[number - 1], **_ends(spread["reached"][number - 1])},
                "accepted_if_all_before_were": {
                    "value": found.conditional[number - 1],
                    **_ends(spread["conditional"][number - 1]),
                },
            }
            for number in range(1, wiring.steps + 1)
        ],
        "counters": {
            "verify_steps": summed.verify_steps,
            "accepted_draft_tokens": summed.accepted,
            "proposed_draft_tokens": summed.proposed,
            "tokens": summed.tokens,
            "histogram": list(summed.histogram),
            "server_verify_steps": wiring.counters.verify_steps[0],
            "server_tokens": wiring.counters.tokens[0],
            "agree": wiring.counters.agrees,
        },
    }


def _contrast_dict(contrast: Contrast) -> dict[str, Any]:
    states = contrast.states
    return {
        "name": contrast.wiring.name,
        "accept_length_difference": {"value": contrast.difference, **_ends(contrast.interval)},
        "acceptance_tells_them_apart": contrast.distinguishable,
        "states": {
            "tokens": states.tokens,
            "relative_errors": list(states.relative_errors),
            "cosines": list(states.cosines),
            "tolerance": states.tolerance,
            "differ": list(states.differ),
        }
        if states
        else None,
    }


def render(report: Report) -> str:
    """Tables, and what they can and cannot show."""
    steps = max(each.steps for each in report.wirings)
    positions = [f"draft {number}" for number in range(1, steps + 1)]
    lines = [table(("wiring", "outputs of layers", "accept length", "accept rate"), [_row(w) for w in report.wirings])]
    lines += ["", "accepted, of the verify steps in which all draft tokens before it were:"]
    lines += [table(("wiring", *positions), [_positions(each, steps) for each in report.wirings])]
    if report.contrasts:
        lines += ["", f"accept length against {report.wirings[0].name}, paired by prompt:"]
        head = ("wiring", "difference", "told apart by acceptance", "told apart by states")
        lines += [table(head, [_contrast_row(each) for each in report.contrasts])]
        if any(each.states for each in report.contrasts):
            lines += ["states: relative error ||a - b|| / ||b|| of what the drafter was fed, the same prompt tokens"]
    lines += ["", f"in brackets: {CONFIDENCE:.0%} intervals, bootstrap over {len(report.wirings[0].answers)} prompts"]
    lines += [_counter_line(each, exclusive=report.exclusive) for each in report.wirings]
    return "\n".join([*lines, *_lesson(report)])


def _row(wiring: Wiring) -> Sequence[str]:
    spread = _spread(wiring)
    layers = ", ".join(str(layer) for layer in wiring.layers) if wiring.layers is not None else "unknown"
    length = _with(wiring.figures.accept_length, spread["length"][0])
    return (wiring.name, layers, length, _with(wiring.figures.accept_rate, spread["rate"][0]))


def _positions(wiring: Wiring, steps: int) -> Sequence[str]:
    intervals = _spread(wiring)["conditional"]
    cells = [_with(value, each) for value, each in zip(wiring.figures.conditional, intervals, strict=True)]
    return (wiring.name, *cells, *[""] * (steps - wiring.steps))


def _contrast_row(contrast: Contrast) -> Sequence[str]:
    verdict = "yes" if contrast.distinguishable else "NO: includes 0"
    difference = _with(contrast.difference, contrast.interval, sign="+")
    return (contrast.wiring.name, difference, verdict, _states(contrast))


def _states(contrast: Contrast) -> str:
    if contrast.states is None:
        return _NO_STATES
    differ = contrast.states.differ
    errors = ", ".join(f"{error:.2f}" for error in contrast.states.relative_errors)
    return f"{sum(differ)} of {len(differ)} differ, by {errors}"


def _counter_line(wiring: Wiring, *, exclusive: bool) -> str:
    check = wiring.counters
    server = [
        f"{'no such counter' if risen is None else risen} {what}"
        for (risen, _), what in ((check.verify_steps, "verify steps"), (check.tokens, "tokens"))
    ]
    verdict = "agrees" if check.agrees else "DISAGREES"
    if not (check.agrees or check.falls_short or exclusive):
        verdict = "more than these answers: somebody else uses this server too"
    summed = f"{check.verify_steps[1]} verify steps, {check.tokens[1]} tokens"
    return f"counters, {wiring.name}: answers {summed}; server {', '.join(server)}: {verdict}"


def _lesson(report: Report) -> list[str]:
    lines = [
        "",
        "Acceptance says how well the drafts fit, not which states the drafter was fed: a layer's neighbour holds",
        "nearly the same states, and a drafter fed those is accepted nearly as often.",
    ]
    alike = [each.wiring.name for each in report.contrasts if not each.distinguishable]
    if alike:
        lines.append(f"Here {' and '.join(alike)} cannot be told from the configured wiring by acceptance.")
        seen = [each.wiring.name for each in report.contrasts if not each.distinguishable and _states_differ(each)]
        if seen:
            lines.append(f"The states tell: {' and '.join(seen)} fed the drafter other states.")
    lines.append("`eagle3-serve verify wiring` compares the states themselves.")
    return lines


def _states_differ(contrast: Contrast) -> bool:
    return contrast.states is not None and any(contrast.states.differ)


def _spread(wiring: Wiring) -> dict[str, tuple[Interval, ...]]:
    """The intervals by name, in the order of Figures.values()."""
    steps, intervals = wiring.steps, wiring.intervals
    return {
        "length": intervals[:1],
        "rate": intervals[1:2],
        "reached": intervals[2 : 2 + steps],
        "conditional": intervals[2 + steps :],
    }


def _ends(interval: Interval) -> dict[str, float]:
    return {"low": interval.low, "high": interval.high}


def _with(value: float, interval: Interval, sign: str = "") -> str:
    return f"{value:{sign}.2f} [{interval.low:{sign}.2f}, {interval.high:{sign}.2f}]"
