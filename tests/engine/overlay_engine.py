"""Run SGLang's offline engine on the CPU, from an overlay, and save what it returns: a program for test_overlay.py.

    python -m tests.engine.overlay_engine JOB.json

JOB: {"engine": arguments of sglang.Engine, "prompts": lists of token ids, "new_tokens": N, "result": file}. The result
(torch.save) has, for each prompt, the output ids and the aux hidden states [prompt + new - 1, states * hidden]
float32, and where sglang and its patched files came from.
"""

import json
import sys
from importlib import metadata
from pathlib import Path


def main(job: dict) -> None:
    import sglang
    import torch

    with sglang.Engine(**job["engine"]) as engine:
        sampling = {"temperature": 0, "max_new_tokens": job["new_tokens"], "ignore_eos": True}
        answers = engine.generate(input_ids=job["prompts"], sampling_params=sampling, return_hidden_states=True)
    found = {
        "sglang_file": sglang.__file__,
        "sglang_version": metadata.version("sglang"),
        "outputs": [answer["output_ids"] for answer in answers],
        "states": [stack(answer["meta_info"]["hidden_states"]) for answer in answers],
    }
    torch.save(found, job["result"])


def stack(pieces: list):
    """SGLang gives one list of rows for the prompt, then one row for each decoded token."""
    import torch

    rows = [torch.tensor(piece, dtype=torch.float32) for piece in pieces]
    return torch.cat([row if row.dim() == 2 else row[None] for row in rows])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
