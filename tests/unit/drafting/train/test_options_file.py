from __future__ import annotations

from pathlib import Path

import pytest

from eagle3_serve.core.errors import ConfigError
from eagle3_serve.core.resources import data_directory
from eagle3_serve.drafting.train.options_file import load_options, table


def written(directory: Path, text: str) -> Path:
    file = directory / "train.yaml"
    file.write_text(text)
    return file


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    options = load_options(written(tmp_path, "lr: 2e-3\nepochs: 7\n"), ["epochs=9"])
    assert (options.lr, options.epochs, options.ttt_steps) == (2e-3, 9, 3)


def test_an_unknown_key_is_an_error_with_file_line_and_the_nearest_key(tmp_path: Path) -> None:
    file = written(tmp_path, "lr: 2e-3\nepoch: 7\n")
    with pytest.raises(ConfigError, match=rf"{file}:2: unknown key epoch; did you mean epochs\?"):
        load_options(file)


def test_an_unknown_flag_names_itself_and_the_nearest_key() -> None:
    with pytest.raises(ConfigError, match=r"--set learning_rte=1: unknown key learning_rte"):
        load_options(None, ["learning_rte=1"])


def test_every_problem_is_listed_at_its_place(tmp_path: Path) -> None:
    file = written(tmp_path, "heads: no\ntokens_per_step: 2\nloss: [ce]\nseed: 1\nseed: 2\n")
    with pytest.raises(ConfigError) as caught:
        load_options(file, ["optimizer=sgd", "kv_heads"])
    message = str(caught.value)
    for part in (
        f"{file}:1: heads: must be a whole number",
        f"{file}:2: tokens_per_step: must be greater than or equal to 16, not 2",
        f"{file}:3: loss must be text, not a list",
        f"{file}:5: key seed was already set at line 4",
        "--set optimizer=sgd: optimizer: must be one of muon, adamw",
        "--set kv_heads: is not of the form key=value",
    ):
        assert part in message


def test_null_leaves_the_choice_and_is_refused_where_there_is_none(tmp_path: Path) -> None:
    assert load_options(written(tmp_path, "heads: null\n")).heads is None
    with pytest.raises(ConfigError, match="lr: needs a number"):
        load_options(None, ["lr="])


def test_a_path_is_relative_to_the_file_that_names_it(tmp_path: Path) -> None:
    assert load_options(written(tmp_path, "from: ../drafter\n")).initial == tmp_path.parent / "drafter"
    assert load_options(None, ["from=a drafter"]).initial == Path.cwd() / "a drafter"


def test_a_drafter_that_is_trained_further_leaves_no_choice_of_its_shape(tmp_path: Path) -> None:
    file = written(tmp_path, "lr: 1e-3\nheads: 4\n")
    with pytest.raises(ConfigError) as caught:
        load_options(file, ["from=x", "fc_norm=true"])
    assert f"{file}:2: delete heads: `from` (--set from=x) brings the drafter's shape" in caught.value.message
    assert "--set fc_norm=true: delete fc_norm" in caught.value.message


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["fc_norm=true", "norm_before_fc=true"], "one norm in two places"),
        (["heads=4", "kv_heads=3"], "no multiple"),
        (["shard=true"], "shard needs devices"),
        (["validation_share=0"], "must be greater than 0"),
        (["validation_share=1"], "must be less than 1"),
    ],
)
def test_what_contradicts_itself_is_refused(sets: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_options(None, sets)


def test_a_missing_file_is_one_clear_error_about_training_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file .*nothing\.yaml") as caught:
        load_options(tmp_path / "nothing.yaml")
    assert "train-kimi.yaml" in caught.value.remedy


def test_the_shipped_files_load_and_one_of_them_has_every_key() -> None:
    configs = data_directory("configs")
    load_options(configs / "train-tiny.yaml")
    kimi = configs / "train-kimi.yaml"
    assert load_options(kimi).devices == 8
    written_keys = [line.partition(":")[0] for line in kimi.read_text().splitlines() if line[:1].isalpha()]
    assert sorted(written_keys) == sorted(table())


def test_every_key_says_what_it_is() -> None:
    assert all(len(key.description) > 10 for key in table().values())


def test_options_come_back_from_what_they_are_written_as(tmp_path: Path) -> None:
    options = load_options(None, ["lr=3e-3", "heads=4", "publish=last"])
    lines = [f"{name}: {'null' if value is None else value}" for name, value in options.as_dict().items()]
    again = load_options(written(tmp_path, "\n".join(lines).replace("True", "true").replace("False", "false")))
    assert again == options
