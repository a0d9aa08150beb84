"""The store: whole samples or none, whatever happens, in the layout that the training library reads."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_serve.core.errors import StoreError
from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.extract.provenance import Identity, target_digest, tokenizer_digest
from eagle3_serve.drafting.extract.store import Sample, SampleError, Store, StoreWriter

TARGET = data_directory("models") / "tiny-kimi" / "target"
IDENTITY = Identity(
    target="sha256:t",
    tokenizer="sha256:k",
    chat_template=None,
    layers=(2, 30, 58),
    last_layer=60,
    hidden_size=8,
    vocab_size=2048,
    dtype="bfloat16",
    sglang="0.5.23",
    overlay="0.5.23-abc",
)
SETTINGS = {"max_length": 64, "regenerate": False}


def sample(name: str, tokens: int = 5, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return Sample(
        id=name,
        token_ids=torch.randint(0, 2048, (tokens,), generator=generator),
        loss_mask=torch.tensor([0] + [1] * (tokens - 1), dtype=torch.uint8),
        states=torch.randn(tokens, 4, 8, generator=generator),
    )


def create(directory: Path, identity: Identity = IDENTITY) -> StoreWriter:
    return StoreWriter.create(directory, identity, SETTINGS, {"target_path": "somewhere"})


@pytest.fixture
def finished(tmp_path) -> Path:
    with create(tmp_path / "store") as writer:
        writer.add(sample("a", 5, seed=1))
        writer.add_many([sample("b", 3, seed=2), sample("c", 7, seed=3)])
        writer.skip("d", "chats.jsonl:4", "its loss mask is all zero")
        writer.finish()
    return tmp_path / "store"


def test_what_was_written_is_read_back_with_its_identity_and_what_was_skipped(finished):
    store = Store.open(finished)
    assert store.complete
    assert store.identity == IDENTITY
    assert [(entry.row, entry.id, entry.tokens, entry.trained) for entry in store.entries] == [
        (0, "a", 5, 4),
        (1, "b", 3, 2),
        (2, "c", 7, 6),
    ]
    assert [(each.id, each.reason) for each in store.skipped] == [("d", "its loss mask is all zero")]
    assert store.tokens == 15
    for row, (name, tokens, seed) in enumerate((("a", 5, 1), ("b", 3, 2), ("c", 7, 3))):
        wanted, found = sample(name, tokens, seed), store.sample(row)
        assert torch.equal(found.token_ids, wanted.token_ids)
        assert torch.equal(found.loss_mask, wanted.loss_mask)
        assert found.states.dtype == torch.bfloat16
        assert torch.equal(found.states, wanted.states.bfloat16())
    assert store.verify_digests() == []


def test_the_dataset_beside_the_shards_has_the_same_rows_in_torch_format(finished):
    import datasets

    rows = datasets.load_from_disk(str(finished))
    assert rows.column_names == ["input_ids", "loss_mask", "seq_len"]
    store = Store.open(finished)
    for row in range(3):
        assert torch.equal(rows[row]["input_ids"], store.sample(row).token_ids)
        assert rows[row]["loss_mask"].tolist() == store.sample(row).loss_mask.tolist()
        assert int(rows[row]["seq_len"]) == store.entries[row].tokens
    counted = torch.load(finished / "token_freq.pt", weights_only=True)
    trained = torch.cat([store.sample(row).token_ids[store.sample(row).loss_mask.bool()] for row in range(3)])
    assert counted == {int(token): int((trained == token).sum()) for token in trained.unique()}
    assert sum(store.token_counts(trained_only=False).values()) == 15


def test_a_store_is_resumed_where_it_was_and_no_id_comes_twice(finished):
    with StoreWriter.resume(finished, IDENTITY, SETTINGS) as writer:
        assert writer.ids == {"a", "b", "c"}
        with pytest.raises(StoreError, match="already"):
            writer.add(sample("b"))
        assert not Store.open(finished).complete
        writer.add(sample("d", seed=4))
        writer.finish()
    store = Store.open(finished)
    assert [entry.id for entry in store.entries] == ["a", "b", "c", "d"]
    assert store.skipped == (), "what is stored after all is no longer listed as skipped"
    assert store.complete


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"target": "sha256:other"}, "target"),
        ({"layers": (1, 29, 57)}, "layers"),
        ({"chat_template": "x"}, "chat_template"),
        ({"overlay": "0.5.23-def"}, "overlay"),
        ({"dtype": "float32"}, "dtype"),
    ],
)
def test_a_store_takes_no_sample_of_another_target_contract_or_overlay(finished, change, named):
    other = Identity.from_dict(IDENTITY.as_dict() | change)
    with pytest.raises(StoreError, match=f"begun with something else: {named}"):
        StoreWriter.resume(finished, other, SETTINGS)
    with pytest.raises(StoreError, match="max_length: 64 there, 32 now"):
        StoreWriter.resume(finished, IDENTITY, SETTINGS | {"max_length": 32})
    assert Store.open(finished).complete, "a refused resume changes nothing"


def test_two_writers_at_once_are_refused(tmp_path):
    with create(tmp_path / "s") as writer:
        writer.add(sample("a"))
        with pytest.raises(StoreError, match="another process writes"):
            StoreWriter.resume(tmp_path / "s", IDENTITY, SETTINGS)
    with StoreWriter.resume(tmp_path / "s", IDENTITY, SETTINGS) as writer:
        assert writer.ids == {"a"}


@pytest.mark.parametrize("name", ["precious.txt", "hidden_states/hs_0.safetensors"])
def test_a_directory_with_anything_in_it_is_not_begun(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    with pytest.raises(StoreError, match="not empty") as error:
        create(tmp_path)
    assert (tmp_path / name).read_text() == "mine"
    assert "--resume" not in error.value.remedy, "it is no store that could be gone on with"


def test_a_store_without_a_sample_may_be_begun_anew_with_another_target(tmp_path):
    with create(tmp_path / "s") as writer:
        writer.skip("a", "chats.jsonl:1", "poisoned")
    (tmp_path / "s" / "hidden_states" / ".hs_0.safetensors.k1ll3d").write_text("half")
    other = Identity.from_dict(IDENTITY.as_dict() | {"target": "sha256:other"})
    with create(tmp_path / "s", other) as writer:
        writer.add(sample("a"))
    store = Store.open(tmp_path / "s")
    assert (store.identity, len(store), store.skipped) == (other, 1, ())
    assert [file.name for file in (tmp_path / "s" / "hidden_states").iterdir()] == ["hs_0.safetensors"]
    with pytest.raises(StoreError, match="not empty"):
        create(tmp_path / "s")


def test_a_process_that_was_killed_before_it_said_what_it_began_is_no_hindrance(tmp_path):
    (tmp_path / "s" / "hidden_states").mkdir(parents=True)
    for name in (".lock", "index.jsonl", ".store.json.k1ll3d"):
        (tmp_path / "s" / name).touch()
    with create(tmp_path / "s") as writer:
        writer.add(sample("a"))
    assert not (tmp_path / "s" / ".store.json.k1ll3d").exists()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / ".store.yaml.mine").touch()
    with pytest.raises(StoreError, match="not empty"):
        create(tmp_path / "t")


def test_a_file_is_no_place_for_a_store(tmp_path):
    (tmp_path / "s").write_text("mine")
    with pytest.raises(StoreError, match="not empty"):
        create(tmp_path / "s")


def test_a_store_that_another_release_began_says_which(tmp_path):
    with StoreWriter.create(tmp_path / "s", IDENTITY, SETTINGS, {"made_by": "eagle3-serve 0.9 extract"}) as writer:
        writer.add(sample("a"))
    newer = Identity.from_dict(IDENTITY.as_dict() | {"overlay": "0.5.23-def"})
    with pytest.raises(StoreError, match=r"0\.5\.23-abc there, 0\.5\.23-def now") as error:
        StoreWriter.resume(tmp_path / "s", newer, SETTINGS)
    assert "eagle3-serve 0.9 extract, SGLang 0.5.23" in error.value.remedy


def test_a_value_that_float16_cannot_hold_is_told_from_nan(tmp_path):
    half = Identity.from_dict(IDENTITY.as_dict() | {"dtype": "float16"})
    large = sample("large")
    large.states[2, 1] = 70_000.0
    with create(tmp_path / "s", half) as writer:
        with pytest.raises(SampleError, match="values that float16 cannot, the first at token 2, state 1"):
            writer.add(large)
        writer.add(sample("a"))


def test_facts_are_said_anew_and_those_of_runs_add_up(finished):
    for number in range(2):
        with StoreWriter.resume(finished, IDENTITY, SETTINGS) as writer:
            writer.tell(inputs=[f"file {number}"])
            writer.note({"samples": number})
    about = Store.open(finished).about
    assert about == {"target_path": "somewhere", "inputs": ["file 1"], "runs": [{"samples": 0}, {"samples": 1}]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s.states[3, 2].fill_(float("nan")), "token 3, state 2"),
        (lambda s: s.states[0, 0].fill_(float("inf")), "token 0, state 0"),
        (lambda s: s.states[1, 1].fill_(3.4e38), "token 1, state 1"),  # finite in float32, not in bfloat16
        (lambda s: s.loss_mask.zero_(), "all zero"),
        (lambda s: s.token_ids.fill_(2048), "vocabulary"),
        (lambda s: s.token_ids.fill_(-1), "vocabulary"),
    ],
)
def test_a_sample_that_must_not_be_trained_on_is_refused_with_the_reason(tmp_path, change, reason):
    bad = sample("bad")
    change(bad)
    with create(tmp_path / "s") as writer:
        with pytest.raises(SampleError, match=reason):
            writer.add(bad)
        assert writer.entries == []


def test_states_of_other_shapes_and_masks_of_other_lengths_are_refused(tmp_path):
    good = sample("x")
    with create(tmp_path / "s") as writer:
        with pytest.raises(SampleError, match="hidden size"):
            writer.add(Sample("x", good.token_ids, good.loss_mask, good.states[:, :3]))
        with pytest.raises(SampleError, match="loss mask"):
            writer.add(Sample("x", good.token_ids, good.loss_mask[:-1], good.states))


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from tests.unit.drafting.extract.test_store import create, sample
    from eagle3_serve.drafting.extract import store
    writer = create(Path(sys.argv[1]))
    writer.add_many([sample("a", seed=1), sample("b", seed=2)])
    at = sys.argv[2]
    if at == "shard":
        import safetensors.torch
        def half(tensors, path, metadata):
            path.write_bytes(bytes(40))
            os.kill(os.getpid(), signal.SIGKILL)
        safetensors.torch.save_file = half
    if at == "description":
        from eagle3_serve.core import files
        files.sync_file = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        writer.close()
    if at == "index":
        writer._append = lambda entries: (os.write(writer._index.fileno(), b'{"row": 2, "id": "c", "tok'),
                                          os.kill(os.getpid(), signal.SIGKILL))
    if at == "dataset":
        from eagle3_serve.drafting.extract import dataset
        import datasets
        datasets.Dataset.save_to_disk = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        writer.finish()
    writer.add(sample("c", seed=3))
"""


@pytest.mark.engine  # for its length: three processes that import torch
@pytest.mark.parametrize("at", ["shard", "index", "dataset", "description"])
def test_a_writer_that_is_killed_leaves_whole_samples_and_the_next_goes_on(tmp_path, at):
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / "s"), at], timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    left = Store.open(tmp_path / "s")
    assert [entry.id for entry in left.entries] == ["a", "b"]
    assert not left.complete
    with StoreWriter.resume(tmp_path / "s", IDENTITY, SETTINGS) as writer:
        assert writer.ids == {"a", "b"}
        writer.add(sample("c", seed=3))
        writer.finish()
    store = Store.open(tmp_path / "s")
    assert [entry.id for entry in store.entries] == ["a", "b", "c"]
    assert store.verify_digests() == []
    assert sorted(file.name for file in (tmp_path / "s" / "hidden_states").iterdir()) == [
        f"hs_{row}.safetensors" for row in range(3)
    ]
    assert [file.name for file in (tmp_path / "s").glob(".*")] == [".lock"]


def test_a_store_without_samples_cannot_be_completed(tmp_path):
    with create(tmp_path / "s") as writer, pytest.raises(StoreError, match="no sample"):
        writer.finish()


def test_a_store_and_a_target_that_do_not_belong_together_are_refused(tmp_path):
    facts = IDENTITY.as_dict() | {"target": target_digest(TARGET), "tokenizer": tokenizer_digest(TARGET)}
    with create(tmp_path / "s", Identity.from_dict(facts)) as writer:
        writer.add(sample("a"))
        writer.finish()
    store = Store.open(tmp_path / "s")
    store.require_target(TARGET)
    other = tmp_path / "other"
    other.mkdir()
    for file in TARGET.iterdir():
        if file.is_file():
            (other / file.name).write_bytes(file.read_bytes())
    store.require_target(other)  # the same files elsewhere
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with pytest.raises(StoreError, match="another target"):
        store.require_target(other)
    weights.write_bytes((TARGET / "model.safetensors").read_bytes())
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    vocabulary["added_tokens"][0]["content"] += "!"
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(StoreError, match="another tokenizer"):
        store.require_target(other)


def test_the_shards_have_what_the_library_reads(finished):
    tensors = load_file(finished / "hidden_states" / "hs_0.safetensors")
    assert tensors["hidden_states"].shape == (5, 4, 8)
    assert tensors["token_ids"].dtype == torch.int64
    assert tensors["loss_mask"].dtype == torch.uint8
