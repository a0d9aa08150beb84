"""Case A1 in the engine: ids, convention and default decide the layers, and what is captured equals transformers.

The tolerance and its margin are those of test_overlay.py: 1e-5, with a neighbouring layer 0.08 away at least.
"""

import json

import pytest

from eagle3_serve.config.schema import Config
from eagle3_serve.serving.preflight import read_checkpoints
from eagle3_serve.serving.prepare import decide_contract
from tests.engine.test_overlay import (
    CAPTURE_ONLY,
    TOLERANCE,
    WRONG_LAYER,
    captured_and_reference,
    distance,
    overlay,  # noqa: F401 - a fixture
    run_engine,
    small,  # noqa: F401 - a fixture
)
from tests.support.tiny_checkpoints import write_random_drafter

# The drafter's ids, the configured convention -> the layers by contract of a target of 8, words of the reason.
CASES = {
    # [2, 30, 58] of a target of 61 in small; as outputs, every test with the tiny Kimi has it.
    "the other convention": ([2, 4, 6], "input", (1, 3, 5), "in convention 'input', as the configuration says"),
    # The last one is the residual stream before the final norm, which unpatched SGLang cannot capture.
    "a set that begins at 5": ([5, 6, 7], "contract", (5, 6, 7), "outputs of layers 5, 6, 7"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_contract_decides_what_is_captured_and_transformers_computes_the_same(
    case,
    overlay,  # noqa: F811
    small,  # noqa: F811
    tmp_path,
):
    ids, convention, expected, words = CASES[case]
    drafter = write_random_drafter(tmp_path / "drafter", small, aux_layers=tuple(ids))
    config = json.loads((drafter / "config.json").read_text())
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    (drafter / "config.json").write_text(json.dumps(config))
    launch = Config.model_validate(
        {
            "target": {"path": small.directory},
            "drafter": {"path": drafter},
            "aux_layers": {"convention": convention},
        }
    )
    contract, findings = decide_contract(launch, read_checkpoints(launch)[0])
    assert contract is not None, findings
    assert contract.layers.outputs == expected
    assert words in contract.reason

    # SGLang gets the ids as they are published, and the contract in the environment, as in a launch.
    capture = CAPTURE_ONLY | {"return_aux_hidden_state_layer_ids": ids}
    run = run_engine(tmp_path / "run", overlay, contract.layers.env_value, model_path=str(small.directory), **capture)
    assert run.reports["capture-rank0.json"]["layers"] == list(expected)
    assert run.reports["capture-rank0.json"]["drafter_ids"] == ids
    for states, wanted in captured_and_reference(run, small.directory, small.hidden):
        right = wanted[:, [layer + 1 for layer in expected]]
        assert states.shape == right.shape
        assert float(distance(states, right).max()) < TOLERANCE
        assert float(distance(states, wanted[:, list(expected)]).min()) > WRONG_LAYER
