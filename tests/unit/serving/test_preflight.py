from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from pydantic import SecretStr
from safetensors.torch import save_file

from eagle3_serve.config.keyfiles import GatewayKeys
from eagle3_serve.config.schema import Config
from eagle3_serve.core.errors import CheckpointError, PortInUseError, PreflightError
from eagle3_serve.serving import preflight
from eagle3_serve.serving.machine import Gpu, Machine
from eagle3_serve.serving.preflight import Finding
from eagle3_serve.serving.prepare import decide_contract
from tests.unit.serving.conftest import HIDDEN, VOCAB, changed

BLACKWELL = Gpu("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, (12, 0))
EIGHT_BLACKWELLS = Machine((BLACKWELL,) * 8, cores=64, sglang="0.5.23", torch="2.14.1")
LAPTOP = Machine((), cores=2, sglang=None, torch=None)


def errors(findings: object) -> list[Finding]:
    assert not isinstance(findings, Finding)
    return [finding for finding in findings if finding.level == "error"]  # type: ignore[attr-defined]


def edit_json(path: Path, **keys: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_a_good_pair_of_checkpoints_has_no_errors(config: Config) -> None:
    checkpoints, findings = preflight.read_checkpoints(config)
    contract, contract_findings = decide_contract(config, checkpoints)
    assert checkpoints.num_layers == 61
    assert contract is not None
    assert contract.layers.outputs == (2, 30, 58)
    found = [*findings, *contract_findings, *preflight.check_drafter(checkpoints)]
    found += preflight.check_fc_width(checkpoints, contract)
    assert errors(found) == []


def test_a_missing_target_is_an_error_that_names_the_directory(config: Config, tmp_path: Path) -> None:
    _, findings = preflight.read_checkpoints(changed(config, target={"path": tmp_path / "nowhere"}))
    (error,) = errors(findings)
    assert str(tmp_path / "nowhere") in error.message
    assert error.error is CheckpointError


def test_a_drafter_of_another_architecture_is_refused(config: Config) -> None:
    edit_json(config.drafter.path / "config.json", architectures=["LlamaForCausalLMEagle"])
    checkpoints, _ = preflight.read_checkpoints(config)
    (error,) = errors(preflight.check_drafter(checkpoints))
    assert "LlamaForCausalLMEagle," in error.message


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size"])
def test_a_drafter_of_another_target_is_refused(config: Config, key: str) -> None:
    edit_json(config.drafter.path / "config.json", **{key: 999})
    checkpoints, _ = preflight.read_checkpoints(config)
    (error,) = errors(preflight.check_drafter(checkpoints))
    assert "999" in error.message


def test_an_fc_that_takes_another_number_of_states_is_refused_with_the_layers(config: Config) -> None:
    save_file({"fc.weight": torch.zeros(HIDDEN, 4 * HIDDEN)}, config.drafter.path / "model.safetensors")
    checkpoints, _ = preflight.read_checkpoints(config)
    contract, _ = decide_contract(config, checkpoints)
    (error,) = errors(preflight.check_fc_width(checkpoints, contract))
    assert "fc.weight is [8, 32]" in error.message
    assert "2, 30, 58" in error.message


@pytest.mark.parametrize(
    ("d2t", "says"),
    [
        ([0, 0, 1, 1], None),
        ([0, 1, 3, 5], "t2d shows it"),
        ([0, 0, 0, 99], "outside"),
        ([0, 0], "2 entries"),
        (None, "no d2t"),
    ],
    ids=["offsets", "ids", "out of range", "too short", "missing"],
)
def test_a_draft_vocabulary_is_checked_before_the_weights_are_loaded(
    config: Config, d2t: list[int] | None, says: str | None
) -> None:
    edit_json(config.drafter.path / "config.json", draft_vocab_size=4)
    tensors = {"fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN)}
    if d2t is not None:
        tensors["d2t"] = torch.tensor(d2t, dtype=torch.int64)
        tensors["t2d"] = torch.tensor(
            [token in {0, 1, 3, 4} if says != "t2d shows it" else token in {0, 1, 3, 5} for token in range(VOCAB)]
        )
    save_file(tensors, config.drafter.path / "model.safetensors")
    checkpoints, _ = preflight.read_checkpoints(config)
    found = errors(preflight.check_draft_vocabulary(checkpoints))
    assert [says in finding.message for finding in found] == ([True] if says else []), found


def test_a_server_that_is_open_to_a_network_without_a_key_is_a_warning(config: Config) -> None:
    exposed = changed(config, gateway={"host": "0.0.0.0"}, engine={"host": ""})
    assert len(list(preflight.check_exposure(exposed, GatewayKeys()))) == 2
    key = SecretStr("same")
    (same,) = preflight.check_exposure(config, GatewayKeys(key, key))
    assert "are the same" in same.message
    assert list(preflight.check_exposure(config, GatewayKeys())) == []


def test_a_layer_that_the_target_does_not_have_is_refused(config: Config) -> None:
    beyond = changed(config, aux_layers={"layers": [2, 30, 61]})
    checkpoints, _ = preflight.read_checkpoints(beyond)
    contract, findings = decide_contract(beyond, checkpoints)
    assert contract is None
    assert "61" in errors(findings)[0].message


def test_layers_that_contradict_the_drafter_are_a_warning_not_an_error(config: Config) -> None:
    wrong = changed(config, aux_layers={"layers": [-1, 2, 31], "convention": "contract"})
    checkpoints, _ = preflight.read_checkpoints(wrong)
    contract, (finding,) = decide_contract(wrong, checkpoints)
    assert contract is not None
    assert finding.level == "warning"
    assert "WARNING" in finding.message


def test_a_served_target_without_drafter_needs_no_contract(config: Config) -> None:
    alone = changed(config, drafter={"enabled": False})
    checkpoints, findings = preflight.read_checkpoints(alone)
    assert checkpoints.drafter is None
    assert decide_contract(alone, checkpoints) == (None, [])
    assert errors(findings) == []


def test_a_target_that_does_not_say_its_sizes_is_refused_and_no_layer_is_guessed(config: Config) -> None:
    (config.target.path / "config.json").write_text('{"text_config": {"hidden_size": 8, "vocab_size": 32}}')
    unsaid = changed(config, aux_layers={"layers": None, "convention": "auto"})
    checkpoints, _ = preflight.read_checkpoints(unsaid)
    (error,) = errors(preflight.check_target(checkpoints))
    assert "num_hidden_layers" in error.message
    contract, findings = decide_contract(unsaid, checkpoints)
    assert contract is None
    assert len(errors(findings)) == 1


def test_a_python_without_this_package_cannot_run_the_patched_files(config: Config) -> None:
    bare = Machine((), 2, sglang="0.5.23", torch="2.14.1", has_runtime=False)
    (error,) = errors(preflight.check_release(config, bare, ["0.5.23"]))
    assert "eagle3-serve" in error.message


def test_sglang_must_be_there_in_the_release_of_the_configuration(config: Config) -> None:
    supported = ["0.5.16", "0.5.23"]
    (missing,) = errors(preflight.check_release(config, LAPTOP, supported))
    assert "pip install sglang==0.5.23" in missing.remedy
    other = Machine((), 2, sglang="0.5.16", torch="2.11.0")
    (wrong,) = errors(preflight.check_release(config, other, supported))
    assert "0.5.16 is installed" in wrong.message
    unknown = Machine((), 2, sglang="0.9.0", torch="3.0")
    (unsupported,) = errors(preflight.check_release(changed(config, engine={"release": None}), unknown, supported))
    assert "no patches for SGLang 0.9.0" in unsupported.message


def test_too_few_gpus_or_cores_are_refused(config: Config) -> None:
    (cores,) = errors(preflight.check_devices(changed(config, engine={"tp_size": 4}), LAPTOP))
    assert "2 processor cores" in cores.message
    on_gpu = changed(config, engine={"device": "cuda", "tp_size": 8})
    (gpus,) = errors(preflight.check_devices(on_gpu, LAPTOP))
    assert "shows 0 GPUs" in gpus.message
    assert errors(preflight.check_devices(on_gpu, EIGHT_BLACKWELLS)) == []


@pytest.mark.parametrize("backend", ["trtllm_mla", "trtllm_mha", "tokenspeed_mla"])
def test_backends_that_do_not_run_on_sm120_are_refused_with_an_alternative(config: Config, backend: str) -> None:
    chosen = changed(
        config,
        engine={"device": "cuda", "attention_backend": backend},
        drafter={"attention_backend": "triton"},
    )
    (error,) = errors(preflight.check_attention_backends(chosen, EIGHT_BLACKWELLS))
    assert "12.0" in error.message
    assert "triton" in error.remedy


def test_a_drafter_does_not_inherit_an_mla_only_backend(config: Config) -> None:
    hopper = Machine((Gpu("NVIDIA H200", 143771, (9, 0)),), 16, "0.5.23", "2.14.1")
    inherited = changed(config, engine={"device": "cuda", "attention_backend": "flashmla"})
    (error,) = errors(preflight.check_attention_backends(inherited, hopper))
    assert "drafter.attention_backend" in error.remedy
    own = changed(inherited, drafter={"attention_backend": "triton"})
    assert errors(preflight.check_attention_backends(own, hopper)) == []


def test_a_taken_gateway_port_is_found_before_anything_starts(config: Config) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (error,) = errors(preflight.check_ports(changed(config, gateway={"port": port})))
    assert error.error is PortInUseError
    assert str(port) in error.message


def test_one_port_for_both_servers_is_refused(config: Config) -> None:
    found = errors(preflight.check_ports(changed(config, gateway={"port": 39999}, engine={"port": 39999})))
    assert "both 39999" in found[0].message


def test_a_directory_that_cannot_be_made_is_an_error(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert errors(preflight.check_directories(config)) == []
    assert not config.paths.run_dir.exists()  # checking makes nothing
    blocked = changed(config, paths={"cache_dir": tmp_path / "file" / "cache"})
    (error,) = errors(preflight.check_directories(blocked))
    assert "paths.cache_dir" in error.message


def test_all_errors_are_raised_at_once_with_the_class_of_the_first() -> None:
    findings = [
        Finding("ok", "a", "fine"),
        Finding("error", "b", "first", "do this", CheckpointError),
        Finding("error", "c", "second", "do that", PreflightError),
    ]
    with pytest.raises(CheckpointError) as caught:
        preflight.require(findings)
    for text in ("first", "second", "do this", "do that"):
        assert text in str(caught.value)
    preflight.require(findings[:1])
