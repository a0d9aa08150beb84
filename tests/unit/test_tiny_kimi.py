"""The tracked checkpoint is whole, small enough, and what its own files say."""

from __future__ import annotations

import json
from pathlib import Path

from eagle3_serve.core.checkpoint_files import read_config, read_tensors, text_config
from eagle3_serve.core.contract import DrafterIds
from eagle3_serve.core.files import sha256_file

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "tiny-kimi"
PROCESSOR = ROOT / "scripts" / "make-tiny-kimi" / "processor"


def test_the_target_is_a_kimi_of_61_layers() -> None:
    config = read_config(MODEL / "target")
    assert config["architectures"] == ["KimiK25ForConditionalGeneration"]
    assert text_config(config)["num_hidden_layers"] == 61
    tensors = read_tensors(MODEL / "target")
    assert len({name.split(".")[3] for name in tensors if ".layers." in name}) == 61


def test_the_drafter_declares_its_layers_by_contract() -> None:
    ids = DrafterIds.from_config(read_config(MODEL / "drafter"))
    assert ids.ids == (2, 30, 58)
    assert ids.convention == "contract"


def test_all_of_it_is_small_enough_to_be_tracked() -> None:
    assert sum(file.stat().st_size for file in MODEL.rglob("*") if file.is_file()) < 20 * 1024 * 1024


def test_the_heldout_chats_end_with_a_question_and_have_a_reference() -> None:
    chats = [json.loads(line) for line in (MODEL / "heldout.jsonl").read_text().splitlines()]
    assert len(chats) == 64
    assert all(chat["messages"][-1]["role"] == "user" and chat["reference"].strip() for chat in chats)


def test_the_processor_in_the_checkpoint_is_the_one_that_is_kept_with_the_scripts() -> None:
    for file in PROCESSOR.iterdir():
        if file.is_file():
            assert sha256_file(file) == sha256_file(MODEL / "target" / file.name)
