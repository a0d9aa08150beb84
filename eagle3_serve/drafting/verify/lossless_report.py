"""What `verify lossless` found, as text for people and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3_serve import __version__
from eagle3_serve.drafting.verify.compare import UNKNOWN_DTYPE, Difference
from eagle3_serve.drafting.verify.lossless import Arm, Question, Report
from eagle3_serve.drafting.verify.table import table

_MOST_SHOWN = 12


def as_dict(report: Report, question: Question) -> dict[str, Any]:
    """Everything, for `--json`. Gaps and noise in nats; `prompt` counts from 0 in the prompt set."""
    return {
        "verdict": "fault" if report.faults else "lossless",
        "faults": report.faults,
        "ties": report.ties,
        "tie_gap": report.tie_gap,
        "near_ties": report.near_ties,
        "dtype": report.dtype,
        "noise": report.noise.as_dict() if report.noise else None,
        "arms": [_arm_dict(arm) for arm in report.arms],
        "prompts": question.prompts.as_dict(),
        "max_tokens": question.max_tokens,
        "concurrency": question.concurrency,
        "seed": question.seed,
        "eagle3_serve": __version__,
        **report.facts,
    }


def _arm_dict(arm: Arm) -> dict[str, Any]:
    return {
        "name": arm.name,
        "prompts": arm.prompts,
        "tokens": arm.tokens,
        "verify_steps": arm.verify_steps,
        "accept_length": arm.accept_length,
        "same": arm.prompts - len(arm.differences),
        "ties": arm.ties,
        "faults": arm.faults,
        "differences": [each.as_dict() for each in arm.differences],
    }


def render(report: Report) -> str:
    """A table, the differences, the noise and the verdict."""
    rows = [_row(arm) for arm in report.arms]
    head = ("arm", "answers", "tokens", "accept length", "same", "ties", "faults", "largest gap")
    lines = [table(head, rows), ""]
    shown = [(arm.name, each) for arm in report.arms for each in arm.differences]
    shown.sort(key=lambda pair: pair[1].tie)  # faults first
    lines += [_line(name, each) for name, each in shown[:_MOST_SHOWN]]
    if len(shown) > _MOST_SHOWN:
        lines.append(f"... and {len(shown) - _MOST_SHOWN} more: --json lists all")
    dtype = report.dtype or f"unknown, taken for {UNKNOWN_DTYPE}"
    lines.append(
        f"tie: a gap of at most {report.tie_gap:g} nats (dtype {dtype}), possible at {report.near_ties:.1%} of the "
        "tokens; anywhere else a difference is a fault"
    )
    if report.noise:
        lines.append(
            f"noise here: one token's logprob differs by up to {report.noise.largest:.2g} nats (99%: "
            f"{report.noise.percentile_99:.2g}) between decode and prefill, {report.noise.positions} tokens"
        )
        if report.noise.largest > report.tie_gap:
            lines.append("WARNING: the noise is larger than a tie may be: is this the same target in the same dtype?")
    lines.append(_verdict(report))
    return "\n".join(lines)


def _row(arm: Arm) -> Sequence[str]:
    gaps = [each.gap for each in arm.differences if each.gap is not None]
    length = f"{arm.accept_length:.2f}" if arm.accept_length else "-"
    same = arm.prompts - len(arm.differences)
    largest = f"{max(gaps):.2g}" if gaps else "-"
    return (arm.name, str(arm.prompts), str(arm.tokens), length, str(same), str(arm.ties), str(arm.faults), largest)


def _line(name: str, each: Difference) -> str:
    split = each.split
    kind = "tie" if each.tie else "FAULT"
    where = f"{kind:5} {name}, prompt {each.prompt + 1}, token {split.position + 1}: "
    tail = " (the batched baseline does the same)" if each.of_batching else ""
    if split.reason != "token":
        return f"{where}{split.detail}{tail}"
    more = "at least " if each.baseline_bound else ""
    gaps = [f"{more}{each.baseline_gap:.2g} in the baseline" if each.baseline_gap is not None else ""]
    gaps.append(f"{each.server_gap:.2g} on this server" if each.server_gap is not None else "not given by this server")
    texts = [f"{text!r} ({token})" for text, token in zip(each.texts, (split.expected, split.got), strict=True)]
    return f"{where}{texts[0]} became {texts[1]}, gap {', '.join(gap for gap in gaps if gap)}{tail}"


def _verdict(report: Report) -> str:
    compared = sum(arm.prompts for arm in report.arms[1:])
    if report.faults:
        return f"NOT LOSSLESS: {report.faults} of {compared} answers differ by more than rounding"
    ties = f", {report.ties} of them up to a numeric tie" if report.ties else ", token for token"
    return f"lossless: {compared} answers agree with the target alone{ties}"
