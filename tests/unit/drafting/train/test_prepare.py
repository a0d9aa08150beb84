from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eagle3_serve.core.checkpoint_files import read_config
from eagle3_serve.core.errors import ConfigError
from eagle3_serve.drafting.draft.checkpoint import load_tensors
from eagle3_serve.drafting.extract.store import Store
from eagle3_serve.drafting.train.options import TrainOptions
from eagle3_serve.drafting.train.plan import Plan, make_plan
from eagle3_serve.drafting.train.prepare import prepare
from tests.support.synthetic_store import KNOWN, TARGET

SHIPPED = TARGET.parent / "drafter"


def listing(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(file.relative_to(directory)): (file.stat().st_size, file.stat().st_mtime_ns)
        for file in directory.rglob("*")
    }


def test_the_vocabulary_is_made_from_this_stores_counts_and_not_from_a_file_left_in_it(own_store: Path, tmp_path: Path):
    np.save(own_store / "d2t-128.npy", np.full(128, 1000))  # what the library would use unasked
    np.save(own_store / "t2d-128.npy", np.zeros(2048, dtype=bool))
    options = TrainOptions(draft_vocab_size=128, validation_share=0.25)
    plan = make_plan(own_store, TARGET, tmp_path / "out", options, "cpu")
    prepared = prepare(plan)
    counts = Store.open(own_store).token_counts()
    d2t, t2d = np.load(plan.files.d2t), np.load(plan.files.t2d)
    ids = set((np.arange(128) + d2t).tolist())
    assert set(counts) <= ids
    assert set(t2d.nonzero()[0].tolist()) == ids
    assert (prepared.draft_vocab_size, prepared.coverage) == (128, 1.0)


def test_the_store_is_only_read(store: Path, plan: Plan) -> None:
    before = listing(store)
    prepare(plan)
    assert listing(store) == before


def test_a_vocabulary_too_small_for_the_store_says_what_it_covers(store: Path, tmp_path: Path) -> None:
    options = TrainOptions(draft_vocab_size=KNOWN // 4, validation_share=0.25)
    prepared = prepare(make_plan(store, TARGET, tmp_path / "out", options, "cpu"))
    assert 0.25 < prepared.coverage < 1
    assert len(prepared.validation) == options.ttt_steps
    assert 1 > prepared.validation[0] > prepared.validation[1]


def test_a_vocabulary_of_one_token_is_right_as_often_as_that_token_comes(store: Path, tmp_path: Path) -> None:
    options = TrainOptions(draft_vocab_size=1, validation_share=0.25)
    plan = make_plan(store, TARGET, tmp_path / "out", options, "cpu")
    prepared = prepare(plan)
    (token,) = np.load(plan.files.t2d).nonzero()[0].tolist()
    measured = [plan.store.sample(row) for row in (6, 7)]
    trained = [token_id for each in measured for token_id in each.token_ids[each.loss_mask.bool()].tolist()]
    assert prepared.validation[0] == pytest.approx(trained.count(token) / len(trained))
    assert prepared.validation[1:] == (0, 0)  # no token follows itself


def test_a_drafter_that_is_trained_further_keeps_its_vocabulary(store: Path, tmp_path: Path) -> None:
    options = TrainOptions(initial=SHIPPED, validation_share=0.25)
    plan = make_plan(store, TARGET, tmp_path / "out", options, "cpu")
    assert prepare(plan).draft_vocab_size == 1536
    assert np.array_equal(np.load(plan.files.d2t), load_tensors(SHIPPED)["d2t"].numpy())
    assert plan.files.initial is not None
    config = read_config(plan.files.initial)
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(plan.files.verifier)
    assert "--draft-config" not in plan.arguments
    assert plan.arguments[plan.arguments.index("--from-pretrained") + 1] == str(plan.files.initial)


def test_a_drafter_of_other_layers_is_not_trained_further(own_store: Path, tmp_path: Path) -> None:
    import json

    file = own_store / "store.json"
    content = json.loads(file.read_text())
    content["identity"]["layers"] = [1, 29, 57]
    file.write_text(json.dumps(content))
    plan = make_plan(own_store, TARGET, tmp_path / "out", TrainOptions(initial=SHIPPED), "cpu")
    with pytest.raises(ConfigError, match=r"fed the outputs of layers \[2, 30, 58\], and the store holds"):
        prepare(plan)
