"""`eagle3-serve draft`: what a drafter's checkpoint is, whether it is right, and other layouts of it.

Errors propagate; `cli.py` reports them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eagle3_serve.cli_layers import parse_layers

if TYPE_CHECKING:
    from eagle3_serve.config.schema import AuxLayersConfig
    from eagle3_serve.drafting.draft.check import Checked
    from eagle3_serve.drafting.draft.show import Description

draft_app = typer.Typer(
    no_args_is_help=True, help="Look at, check and convert a drafter's checkpoint.", rich_markup_mode=None
)

DrafterArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the drafter's checkpoint.")]
TargetOption = Annotated[
    Path | None,
    typer.Option("--target", metavar="DIR", show_default=False, help="Directory of the target's checkpoint."),
]
LayersOption = Annotated[
    str | None,
    typer.Option("--layers", metavar="LAYERS", show_default=False, help="Layer ids as 2,30,58, in --convention."),
]
ConventionOption = Annotated[
    Literal["auto", "contract", "input", "sglang-0.5.9", "sglang-0.5.16+"],
    typer.Option("--convention", help="What a layer id means: contract: the layer's output; input: what enters it."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable output on standard output.")]


@draft_app.command(epilog="Example: eagle3-serve draft show models/tiny-kimi/drafter --target models/tiny-kimi/target")
def show(drafter: DrafterArgument, target: TargetOption = None, as_json: JsonOption = False) -> None:
    """Say what a drafter is: layout, tensors, states, layers, vocabulary, RoPE, and which SGLang releases serve it.

    Any layout that is known: SGLang's, and that of speculators. With --target the layer ids are resolved for it.
    """
    from eagle3_serve.drafting.draft.show import describe  # noqa: PLC0415

    description = describe(drafter, target)
    typer.echo(json.dumps(description.as_dict(), indent=2) if as_json else render(description))


@draft_app.command(epilog="Example: eagle3-serve draft check models/tiny-kimi/drafter --target models/tiny-kimi/target")
def check(
    *,
    drafter: DrafterArgument,
    target: Annotated[Path, typer.Option("--target", metavar="DIR", help="Directory of the target's checkpoint.")],
    release: Annotated[
        Literal["0.5.9", "0.5.16", "0.5.23"] | None,
        typer.Option("--release", show_default=False, help="SGLang release; left out: the installed one."),
    ] = None,
    layers: LayersOption = None,
    convention: ConventionOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Check a drafter as a launch would, and its weights; say what SGLang by itself would do with each fault.

    All findings are shown. Exit code 0: nothing is wrong; else that of the first error: 11 (checkpoint), 12 (layers).
    """
    from eagle3_serve.drafting.draft.check import check_draft, default_release, error_of  # noqa: PLC0415

    chosen = release or default_release()
    found = check_draft(drafter, target, chosen, aux_layers=_aux_layers(layers, convention))
    if as_json:
        content = {
            "ok": not any(each.is_error for each in found),
            "drafter": str(drafter),
            "target": str(target),
            "release": chosen,
            "findings": [each.as_dict() for each in found],
        }
        typer.echo(json.dumps(content, indent=2))
    else:
        typer.echo(render_findings(found))
    if error := error_of(found, drafter):
        raise error
    if not as_json:
        typer.echo(f"{drafter}: right for {target} and SGLang {chosen}")


@draft_app.command(
    epilog="Example: eagle3-serve draft convert checkpoints/best my-drafter --to sglang --target my-target"
)
def convert(
    *,
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Directory of the checkpoint to convert.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="New directory; one that exists is refused.")],
    to: Annotated[
        Literal["sglang", "sglang-layers", "speculators"],
        typer.Option(
            "--to",
            show_default=False,
            help="sglang: layer called midlayer, for every release; sglang-layers: layers.0, from 0.5.16 on; "
            "speculators: the training library's layout.",
        ),
    ],
    target: TargetOption = None,
    layers: LayersOption = None,
    convention: ConventionOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write a drafter in another layout, complete and checked, with a record of where it came from.

    Tensors keep their values and dtypes. d2t stored as ids is repaired only where t2d proves it; what the other layout
    cannot say is refused. With --target sizes and embedding are compared with the target's.
    """
    from eagle3_serve.drafting.draft.convert import Request, convert_draft  # noqa: PLC0415
    from eagle3_serve.drafting.draft.layouts import Goal  # noqa: PLC0415

    done = convert_draft(Request(source, destination, Goal(to), target, parse_layers(layers, "--layers"), convention))
    if as_json:
        typer.echo(json.dumps(done.as_dict(), indent=2))
        return
    typer.echo(f"{done.destination}: {done.goal}, from {done.source_layout} in {done.source}")
    typer.echo(f"layers: {done.layers}")
    for note in done.notes:
        typer.echo(f"note: {note}")


def render(shown: Description) -> str:
    """A description for people."""
    lines = [
        f"{shown.path}: {shown.architecture}, layout {shown.layout}",
        f"  parameters    {shown.parameters:,} in {shown.weight_bytes / 2**20:,.1f} MiB, {len(shown.tensors)} tensors",
        f"  widths        drafter {shown.hidden_size}, target {shown.target_hidden_size}",
        f"  fc            {shown.fc}",
        f"  states        {shown.states}; ids {list(shown.ids) if shown.ids else 'none'}, convention "
        f"{shown.convention or 'not said'}",
        f"  layers        {shown.layers}",
        f"  vocabulary    {shown.vocabulary}",
        f"  embedding     {shown.embedding}",
        f"  head          {shown.head}",
        *(f"  feature       {feature}" for feature in shown.features or ("none of EAGLE-3.1",)),
    ]
    for each in shown.releases:
        verdict = "serves it" if each.serves else "REFUSED"
        lines.append(f"  SGLang {each.release:<7}{each.condition}{verdict}; RoPE {each.rope}")
        lines += [f"                without eagle3-serve it would capture {each.captures_alone}"] * bool(
            each.captures_alone
        )
        lines += [f"                refused: {fault}" for fault in each.faults]
        lines += [f"                warning: {remark}" for remark in each.remarks]
    width = max(len(tensor.name) for tensor in shown.tensors) if shown.tensors else 0
    lines += [f"  tensor        {t.name:<{width}}  {t.dtype:<5} {list(t.shape)}" for t in shown.tensors]
    lines += [f"  metadata      {key}: {text}" for key, text in shown.metadata.items()]
    lines += [f"  provenance    {name}: {json.dumps(content)}" for name, content in shown.provenance.items()]
    return "\n".join(lines)


def render_findings(found: list[Checked]) -> str:
    """All findings for people, one after another."""
    lines = []
    for each in found:
        finding = each.finding
        lines.append(f"{finding.level:8} {finding.check}: {finding.message}")
        lines += [f"         without eagle3-serve: {each.sglang}"] if each.sglang else []
        lines += [f"         what to do: {finding.remedy}"] if finding.remedy else []
    return "\n".join(lines)


def _aux_layers(layers: str | None, convention: str) -> AuxLayersConfig:
    from eagle3_serve.config.schema import AuxLayersConfig  # noqa: PLC0415

    return AuxLayersConfig.model_validate({"layers": parse_layers(layers, "--layers"), "convention": convention})
