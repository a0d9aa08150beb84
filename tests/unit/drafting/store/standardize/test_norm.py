"""The final norm: told by numbers, taken out exactly, or refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eagle3_serve.core.errors import CheckpointError, PartialResultError, StoreError
from eagle3_serve.drafting.draft.checkpoint import load_tensors
from eagle3_serve.drafting.store.standardize import Last
from eagle3_serve.drafting.store.standardize.norm import FinalNorm
from tests.unit.drafting.store.standardize.conftest import HIDDEN, TARGET, Workplace, made, norm, specforge

NORM = "language_model.model.norm.weight"


def states(scale: float = 5.0, rows: int = 512) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    lengths = 0.1 + torch.rand(rows, 1, generator=generator)
    return scale * lengths * torch.randn(rows, HIDDEN, generator=generator)


@pytest.mark.parametrize(
    ("dtype", "most"),
    [(torch.float32, 1e-5), (torch.float16, 2**-10), (torch.bfloat16, 2**-7)],
    ids=["float32", "float16", "bfloat16"],
)
def test_the_norm_of_a_state_taken_out_of_it_is_the_state_again(dtype: torch.dtype, most: float) -> None:
    """`most`: of the error relative to the value; for 16 bits one step of the format, from one rounding of y / w."""
    wanted = norm().apply(states())
    found = norm().apply(norm().undo(wanted, dtype))
    assert float(((found - wanted).abs() / wanted.abs()).max()) <= most


def test_in_bfloat16_throughout_the_error_is_one_step_and_two_in_a_thousand_of_the_norm() -> None:
    y = norm().apply(states()).bfloat16()
    again = norm().apply(norm().undo(y, torch.bfloat16)).bfloat16()
    assert float(((again.float() - y.float()).abs() / y.float().abs()).max()) <= 2**-7
    assert float((again.float() - y.float()).norm() / y.float().norm()) < 2.5e-3
    assert float((again == y).float().mean()) > 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [0.5, 5.0, 300.0])
def test_rows_after_the_norm_are_told_from_rows_before_it(dtype: torch.dtype, scale: float) -> None:
    before = states(scale)
    # Rounded before the weight and after it, as engines do.
    after = (norm().apply(before) / norm().weight).to(dtype) * norm().weight.to(dtype)
    assert bool(norm().is_behind(after).all())
    assert float(norm().is_behind(before.to(dtype)).float().mean()) < 0.3


def test_what_the_last_state_is_is_said_with_the_numbers(place: Workplace) -> None:
    place.save("data_0.ckpt", specforge(made(0)))
    report = place.run()
    assert report.notes[-1].startswith(f"the last state is after the final norm: rms(state / {NORM}) is 1 within 2%")
    assert place.store().about["conversions"] == list(report.notes)


def test_a_writer_that_stored_the_state_before_the_norm_is_believed_by_its_numbers(place: Workplace) -> None:
    place.save("data_0.ckpt", specforge(made(0)) | {"hidden_state": made(0).last[None]})
    plan, found = place.read()
    assert plan.last is Last.BEFORE_NORM
    assert torch.equal(found.states, made(0).states)


@pytest.mark.parametrize(
    ("said", "last"),
    [(Last.BEFORE_NORM, made(0).normed()), (Last.AFTER_NORM, made(0).last)],
    ids=["before", "after"],
)
def test_last_is_refused_where_the_numbers_contradict_it(place: Workplace, said: Last, last: torch.Tensor) -> None:
    place.save("data_0.ckpt", specforge(made(0)) | {"hidden_state": last[None]})
    with pytest.raises(StoreError, match=f"--last {said} is contradicted by the numbers"):
        place.run(last=said)


def mixed() -> torch.Tensor:
    sample = made(0)
    rows = sample.normed()
    rows[: len(rows) // 4] = sample.last[: len(rows) // 4]
    return rows


@pytest.mark.parametrize(("rows", "why"), [(mixed(), "9 of 12"), (made(0, 4).normed(), "4 of 4")], ids=["mixed", "few"])
def test_where_the_numbers_do_not_tell_nothing_is_written(place: Workplace, rows: torch.Tensor, why: str) -> None:
    place.save("data_0.ckpt", specforge(made(0, len(rows))) | {"hidden_state": rows[None]})
    with pytest.raises(StoreError, match=f"cannot be told from the numbers: .* in {why} rows"):
        place.run()
    assert not place.destination.exists()


def test_each_sample_is_held_to_what_the_first_ones_are(place: Workplace) -> None:
    for index in range(5):
        place.save(f"data_{index}.ckpt", specforge(made(index)))
    place.save("data_5.ckpt", specforge(made(5)) | {"hidden_state": made(5).last[None]})
    with pytest.raises(PartialResultError, match="is not what the target's final norm leaves: at token 0"):
        place.run()
    assert len(place.store()) == 5


def target_with(directory: Path, changes: dict[str, torch.Tensor | None], **config: Any) -> Path:
    """The tiny target with other tensors or another configuration of its text model."""
    directory.mkdir()
    for file in TARGET.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, directory / file.name)
    tensors = {**load_tensors(TARGET), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None and "layers." not in name}
    save_file(kept, directory / "model.safetensors")
    file = directory / "config.json"
    content = json.loads(file.read_text())
    content["text_config"] |= config
    file.write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("entry", [0.0, 1e-6])
@pytest.mark.parametrize("said", [Last.AFTER_NORM, Last.AUTO])
def test_a_weight_that_cannot_be_divided_by_is_refused(
    place: Workplace, tmp_path: Path, entry: float, said: Last
) -> None:
    weight = norm().weight.clone()
    weight[7] = entry
    target = target_with(tmp_path / "target", {NORM: weight})
    y = FinalNorm.read(target).apply(made(0).last)
    place.save("data_0.ckpt", specforge(made(0)) | {"hidden_state": y[None]})
    with pytest.raises(
        StoreError, match=r"1 of 96 entries of language_model\.model\.norm\.weight are zero or next to it"
    ):
        place.run(target=target, last=said)


def test_a_weight_with_a_zero_does_not_hinder_states_from_before_the_norm(place: Workplace, tmp_path: Path) -> None:
    weight = norm().weight.clone()
    weight[7] = 0
    target = target_with(tmp_path / "target", {NORM: weight})
    place.save("data_0.ckpt", specforge(made(0)) | {"hidden_state": made(0).last[None]})
    assert place.read(target=target)[0].last is Last.BEFORE_NORM


@pytest.mark.parametrize(
    ("changes", "config", "match"),
    [
        ({NORM: None}, {}, "0 tensors that could be the final norm's"),
        ({NORM.replace("weight", "bias"): torch.ones(96)}, {}, "has a bias"),
        ({NORM: torch.ones(64)}, {}, r"is \[64\]"),
        ({}, {"rms_norm_eps": None}, "no rms_norm_eps"),
    ],
)
def test_a_target_whose_norm_is_not_understood_is_refused(
    place: Workplace, tmp_path: Path, changes: dict[str, torch.Tensor | None], config: dict[str, Any], match: str
) -> None:
    place.save("data_0.ckpt", specforge(made(0)))
    with pytest.raises(CheckpointError, match=match):
        place.run(target=target_with(tmp_path / "target", changes, **config))


def test_a_family_that_multiplies_with_one_plus_the_weight_is_known(tmp_path: Path) -> None:
    target = target_with(tmp_path / "target", {}, model_type="gemma3_text")
    assert torch.equal(FinalNorm.read(target).weight, norm().weight + 1)


@pytest.mark.engine
def test_what_transformers_returns_becomes_states_whose_norm_and_head_give_the_models_logits(place: Workplace) -> None:
    """A real forward of the target: `output_hidden_states` as it is, saved by torch.save."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text = json.loads((TARGET / "config.json").read_text())["text_config"]
    config = AutoConfig.for_model(text.pop("model_type"), **text)
    model = AutoModelForCausalLM.from_pretrained(
        TARGET, config=config, dtype=torch.float32, key_mapping={r"^language_model\.": ""}, local_files_only=True
    ).eval()
    kept: list[torch.Tensor] = []
    for layer in (2, 30, 58, 60):
        model.model.layers[layer].register_forward_hook(
            lambda _module, _arguments, output: kept.append(output[0] if isinstance(output, tuple) else output)
        )
    ids = torch.arange(100, 148)
    with torch.inference_mode():
        output = model(ids[None], output_hidden_states=True, use_cache=False)
    place.save(
        "a.pt",
        {"input_ids": ids[None], "loss_mask": torch.ones(48), "hidden_states": tuple(output.hidden_states)},
    )

    plan, found = place.read(dtype="float32")

    assert plan.last is Last.AFTER_NORM
    assert torch.equal(found.states[:, :3], torch.stack([state.view(48, HIDDEN) for state in kept[:3]], dim=1))
    logits = model.lm_head(norm().apply(found.states[:, 3])).detach()
    assert float((logits - output.logits[0]).norm() / output.logits.norm()) < 1e-5
    # Only the length of the last layer's output is lost.
    cosine = torch.nn.functional.cosine_similarity(found.states[:, 3], kept[3].view(48, HIDDEN))
    assert float(cosine.min()) > 0.99999
