"""The main job, shown: `eagle3-serve launch`, one chat completion, the accept length, how to call it.

With --once it checks itself: greedy answers must not change when the drafter is taken away.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_serve.config.resolve import load_config
from eagle3_serve.core.client import Answer, Client, acceptance
from eagle3_serve.core.errors import EagleServeError, EngineStartError, VerificationError
from eagle3_serve.core.process import start_on_lifeline
from eagle3_serve.core.reporter import Reporter, make_reporter

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "configs" / "tiny-cpu.yaml"
HELDOUT = ROOT / "models" / "tiny-kimi" / "heldout.jsonl"
QUESTION = "What does shutil.copytree do?"
ANSWER_TOKENS = 96
PROMPTS = 8
SHORTEST_PROMPT = 64
POLL_S = 0.25
STOP_TIMEOUT_S = 60

Json = dict[str, Any]


class Launch:
    """`eagle3-serve launch --json` as a child; its events arrive in order."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "eagle3_serve", "launch", "--config", str(CONFIG), "--json", *arguments]
        self.process, self._lifeline = start_on_lifeline(command)
        self._events: queue.Queue[Json | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self._events.put(json.loads(line))
        finally:
            self._events.put(None)

    def wait_ready(self, reporter: Reporter) -> Json:
        """The `ready` event. Ends with the launcher's own exit code if it gives up: it has said why."""
        started, stage = time.monotonic(), "checking"
        while True:
            try:
                event = self._events.get(timeout=POLL_S)
            except queue.Empty:
                event = {"event": "tick"}
            if event is None:
                raise SystemExit(self.process.wait() or EngineStartError.exit_code)
            if event["event"] == "ready":
                return event
            if event["event"] == "stage":
                stage = event["text"]
            reporter.stage(stage, time.monotonic() - started)

    def stop(self) -> None:
        """SIGTERM and a bounded wait; the launcher takes the engine with it. Another Ctrl-C hurries it."""
        deadline = time.monotonic() + STOP_TIMEOUT_S
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        while self.process.poll() is None:
            try:
                self.process.wait(deadline - time.monotonic())
            except KeyboardInterrupt:
                self.process.send_signal(signal.SIGTERM)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def launched(reporter: Reporter, *arguments: str) -> Iterator[tuple[Launch, Json]]:
    launch = Launch(*arguments)
    try:
        yield launch, launch.wait_ready(reporter)
    finally:
        launch.stop()


def show(ready: Json, answer: Answer, num_draft_tokens: int) -> None:
    """The answer and how to get it with other clients; a configured key is named, never printed."""
    reached = acceptance([answer], num_draft_tokens)
    length = f"{reached.accept_length:.2f} tokens a verify step" if reached else "no drafter"
    url, model = ready["url"], ready["model"]
    header = ' -H "Authorization: Bearer $KEY"' if api_key() else ""
    key = 'os.environ["KEY"]' if api_key() else '"none"'
    print(f"""
> {QUESTION}
{answer.text}

{answer.completion_tokens} tokens in {answer.seconds:.1f} s, accept length {length} (1 would be no gain)

Call it:

curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{{
  "model": "{model}", "max_tokens": 96, "temperature": 0,
  "messages": [{{"role": "user", "content": "{QUESTION}"}}]}}'

from openai import OpenAI  # .venv/bin/python has it
client = OpenAI(base_url="{url}/v1", api_key={key})
print(client.chat.completions.create(
    model="{model}", max_tokens=96, temperature=0,
    messages=[{{"role": "user", "content": "{QUESTION}"}}],
).choices[0].message.content)
""")


def long_prompts() -> list[list[Json]]:
    """Held-out conversations: a question, its reference answer, and the next question, which is the one to answer."""
    chats = [json.loads(line) for line in HELDOUT.read_text().splitlines()[: 2 * PROMPTS]]
    return [
        [*first["messages"], {"role": "assistant", "content": first["reference"]}, *second["messages"]]
        for first, second in zip(chats[::2], chats[1::2], strict=True)
    ]


def answers(client: Client, prompts: Sequence[list[Json]]) -> list[Answer]:
    given = [client.chat(prompt, max_tokens=ANSWER_TOKENS) for prompt in prompts]
    if (shortest := min(answer.prompt_tokens for answer in given)) < SHORTEST_PROMPT:
        raise VerificationError(f"a prompt has {shortest} tokens, fewer than {SHORTEST_PROMPT}: {HELDOUT}")
    return given


def api_key() -> str | None:
    key = load_config(CONFIG, environ=os.environ).secrets.api_key
    return key.get_secret_value() if key else None


def once(reporter: Reporter, *, as_json: bool) -> None:
    any_port = ("--set", "gateway.port=0")
    drafter = load_config(CONFIG, environ=os.environ).config.drafter
    with (
        launched(reporter, *any_port) as (_, ready),
        Client(ready["url"], model=ready["model"], api_key=api_key()) as client,
    ):
        reporter.event("check", "with the drafter")
        chat = client.chat([{"role": "user", "content": QUESTION}], max_tokens=ANSWER_TOKENS)
        prompts = long_prompts()
        drafted = answers(client, prompts)
        if not as_json:
            show(ready, chat, drafter.num_draft_tokens)
    with (
        launched(reporter, *any_port, "--set", "drafter.enabled=false") as (_, baseline),
        Client(baseline["url"], model=baseline["model"], api_key=api_key()) as client,
    ):
        reporter.event("check", "without the drafter")
        plain = answers(client, prompts)
    reached = acceptance(drafted, drafter.num_draft_tokens)
    if reached is None:
        raise VerificationError("no draft was verified: the engine served without its drafter")
    same = [one.text == other.text for one, other in zip(drafted, plain, strict=True)]
    result = {
        "ready_s": ready["ready_s"],
        "completion_tokens": sum(answer.completion_tokens for answer in drafted),
        "accept_length": round(reached.accept_length, 3),
        "accept_rate": round(reached.accept_rate, 3),
        "lossless": all(same),
        "sglang": ready["overlay"].partition("-")[0],
        "overlay": ready["overlay"],
    }
    print(json.dumps(result) if as_json else "\n".join(f"{key:18} {value}" for key, value in result.items()))
    if not all(same):
        raise VerificationError(f"{same.count(False)} of {PROMPTS} greedy answers differ without the drafter")


def keep_serving(reporter: Reporter) -> None:
    drafter = load_config(CONFIG, environ=os.environ).config.drafter
    with launched(reporter) as (launch, ready):
        with Client(ready["url"], model=ready["model"], api_key=api_key()) as client:
            answer = client.chat([{"role": "user", "content": QUESTION}], max_tokens=ANSWER_TOKENS)
        reporter.event("ready", f"ready after {ready['ready_s']} s")
        show(ready, answer, drafter.num_draft_tokens)
        print(f"Serving at {ready['url']} until Ctrl-C. Engine log: {ready['engine_log']}", flush=True)
        code = launch.process.wait()
    if code != 0:
        raise SystemExit(code)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/quickstart", description=__doc__)
    parser.add_argument("--once", action="store_true", help="check the main job, stop everything, exit")
    parser.add_argument("--json", action="store_true", help="with --once: end with one JSON line")
    arguments = parser.parse_args()
    if arguments.json and not arguments.once:
        parser.error("--json goes with --once: a server that keeps running has no last line")
    try:
        with make_reporter(as_json=False) as reporter:
            once(reporter, as_json=arguments.json) if arguments.once else keep_serving(reporter)
    except EagleServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 0 if not arguments.once else 130
    return 0


if __name__ == "__main__":
    # `kill` and a terminal that goes away should stop the engine as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
