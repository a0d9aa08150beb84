"""The parts of the measurement; `scripts/measure-gpu/run` says how.

measure.py PART... --out DIR [--toy]        PART: target, extract, store, train, wiring, serve, report, or all
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sizes import H200, ROOT, TOY, Sizes

from eagle3_serve.core.errors import EagleServeError

sys.path.insert(0, str(ROOT / "scripts"))


def target(sizes: Sizes, out: Path) -> Any:
    from target import make_target  # noqa: PLC0415 - each part loads only what it needs

    return make_target(sizes, out)


def extract(sizes: Sizes, out: Path) -> Any:
    from extraction import measure_extraction  # noqa: PLC0415

    return measure_extraction(sizes, out)


def store(sizes: Sizes, out: Path) -> Any:
    from drafter import make_store  # noqa: PLC0415

    return make_store(sizes, out)


def train(sizes: Sizes, out: Path) -> Any:
    from drafter import make_drafter  # noqa: PLC0415

    return make_drafter(sizes, out)


def wiring(sizes: Sizes, out: Path) -> Any:
    from wiring import verify_wiring  # noqa: PLC0415

    return verify_wiring(sizes, out)


def serve(sizes: Sizes, out: Path) -> Any:
    from serving import measure_serving  # noqa: PLC0415

    return measure_serving(sizes, out)


def report(sizes: Sizes, out: Path) -> Any:
    from report import write_report  # noqa: PLC0415

    return write_report(sizes, out)


PARTS: Mapping[str, Callable[[Sizes, Path], Any]] = {
    each.__name__: each for each in (target, extract, store, train, wiring, serve, report)
}


# Seen on one H200, without what else ran beside it; `extract` by the sizes that it has now.
MINUTES: Mapping[str, float] = {
    "target": 4.5,
    "extract": 4,
    "store": 2.5,
    "train": 1.6,
    "wiring": 1.2,
    "serve": 4,
    "report": 0,
}
# Whose results are of files that a part makes anew, its own included.
STALE: Mapping[str, tuple[str, ...]] = {
    "target": ("target", "extraction", "store", "training", "wiring", "serving"),
    "extract": ("extraction",),
    "store": ("store", "training", "wiring", "serving"),
    "train": ("training", "wiring", "serving"),
    "wiring": ("wiring",),
    "serve": ("serving",),
    "report": (),
}


def changed(sizes: Sizes, sets: list[str]) -> Sizes:
    """With other whole numbers, as `train_seconds=150`."""
    known = {each.name for each in dataclasses.fields(sizes) if isinstance(getattr(sizes, each.name), int | float)}
    numbers: dict[str, Any] = {}
    for each in sets:
        name, _, value = each.partition("=")
        if name not in known or not value.isdigit():
            raise SystemExit(f"--set {each}: NAME=WHOLE NUMBER, NAME one of {', '.join(sorted(known))}")
        numbers[name] = int(value)
    return dataclasses.replace(sizes, **numbers)


def run(names: list[str], sizes: Sizes, out: Path) -> None:
    """The parts in the order given. A part's results, and those made from them, are removed before it begins, so that
    a report never joins two runs."""
    if not sizes.is_toy:
        estimates = ", ".join(f"{name} {MINUTES[name]:g}" for name in names)
        print(f"minutes on an H200, about: {estimates}; in all {sum(map(MINUTES.__getitem__, names)):g}", flush=True)
    for name in names:
        begin = time.monotonic()
        for stale in STALE[name]:
            (out / "results" / f"{stale}.json").unlink(missing_ok=True)
        print(json.dumps(PARTS[name](sizes, out), indent=1), flush=True)
        print(f"== {name}: {time.monotonic() - begin:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/measure-gpu/run", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all"])
    parser.add_argument("--out", type=Path, required=True, help="where everything is kept between the parts")
    parser.add_argument("--toy", action="store_true", help="small, on the CPU: tries the scripts out")
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="NAME=VALUE", help="another size")
    given = parser.parse_args()
    from steps import StepError  # noqa: PLC0415

    sizes, out = changed(TOY if given.toy else H200, given.sets), given.out.resolve()
    for directory in (out, out / "results", out / "target"):
        directory.mkdir(parents=True, exist_ok=True)
    try:
        run(list(PARTS) if "all" in given.parts else given.parts, sizes, out)
    except (EagleServeError, StepError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("error: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
