"""RoPE as the preflight says SGLang computes it, against the rotary embedding that the installed SGLang builds."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from eagle3_serve.serving.engine.cpu import settings
from eagle3_serve.serving.preflight.rope import effective
from tests.unit.serving.preflight.test_rope import SPELLINGS

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 8192}
# What LlamaDecoderLayer does with a config, without the rest of the layer.
PROGRAM = """
import json, sys
from transformers import LlamaConfig
from sglang.srt.layers.rotary_embedding import get_rope
built = {}
for name, keys in json.loads(sys.argv[1]).items():
    scaling = LlamaConfig(**keys).rope_parameters
    rope = get_rope(16, rotary_dim=16, max_position=8192, base=scaling["rope_theta"], rope_scaling=scaling)
    built[name] = {
        "theta": rope.base,
        "factor": getattr(rope, "scaling_factor", None),
        "magnitude": getattr(rope, "mscale", 1.0),
        "positions": rope.max_position_embeddings,
    }
print(json.dumps(built))
"""


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, float]]:
    configs = {name: SIZES | keys for name, keys in SPELLINGS.items() if name != "linear"}
    environment = os.environ | settings.engine_environment(1, 1) | {"PYTHONPATH": str(settings.site_directory())}
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(configs)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    return json.loads(answer.stdout.splitlines()[-1])


def test_every_spelling_gives_the_values_that_the_preflight_shows(built):
    for name, values in built.items():
        ours = effective(SPELLINGS[name] | SIZES, "drafter", metadata.version("sglang"))
        assert values["theta"] == ours.theta, name
        assert values["factor"] == ours.factor, name
        assert values["magnitude"] == pytest.approx(ours.magnitude), name
        assert ours.original in (None, values["positions"]), name
