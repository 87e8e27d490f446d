"""A parser of tool calls that is silent for a whole argument, on real engines: the answer is whole
at deadlines of 2 s.
"""

# The engines have vLLM's parser `qwen3_coder` and a model that always writes one call with an
# argument of 3 kB (`make_writing_model.py`). `PDPROXY_TEST_SILENCE_OUT` names a file to which the
# measured silences are added.

import dataclasses
import json
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .build import ensure
from .client import Answer, Progress, ask
from .engine import MODEL, Role
from .fleet import Fleet
from .launcher import Launcher
from .proxy import Proxy

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1800, func_only=True)]

OUT = os.environ.get("PDPROXY_TEST_SILENCE_OUT")
NAMES: dict[str, Role] = {"writer": "plain", "writer-p": "prefill", "writer-d": "decode"}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
DEADLINE, TIMEOUT = 2, 600.0
SETTINGS = {
    "deadlines": {
        "first_token": DEADLINE,
        "between_tokens": DEADLINE,
        "stream_comment": 1,
        "probe": 20,
    },
    "limits": {"attempts": 1, "continuations": 0},
}
WATCHED = {"health": {"stalled_after": 60}}
"""A step of an engine takes seconds where the machine is busy."""
UNWATCHED = {"health": {"stalled_after": 0}}
"""Nothing excuses a silence."""
OPTIONAL_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
"""As pydantic writes it. Whether the text is `null` shows at its end: the parser sends nothing
before. A plain text flows.
"""
SCHEMA = {"type": "object", "properties": {"content": OPTIONAL_TEXT}, "required": ["content"]}
TOOL: dict[str, dict[str, Any]] = {
    CHAT: {"type": "function", "function": {"name": "write_file", "parameters": SCHEMA}},
    RESPONSES: {"type": "function", "name": "write_file", "parameters": SCHEMA},
    MESSAGES: {"name": "write_file", "input_schema": SCHEMA},
}


class Silences(Progress):
    """The longest time in which no event came: from the first one on, and before that."""

    def __init__(self) -> None:
        super().__init__(1)
        self.first = self.longest = 0.0
        self._events = 0
        self._last = self._begun = time.monotonic()

    def saw(self, answer: Answer) -> None:
        super().saw(answer)
        events, now = len(_events(answer)), time.monotonic()
        if events == self._events:
            return  # a comment
        if not self._events:
            self.first = now - self._begun
        else:
            self.longest = max(self.longest, now - self._last)
        self._events, self._last = events, now


def _events(answer: Answer) -> list[dict[str, Any]]:
    """Return the events of a stream of any of the routes, without comments and end mark."""
    lines = [
        line.removeprefix(b"data: ")
        for line in answer.body.split(b"\n")
        if line.startswith(b"data: {")
    ]
    return [json.loads(line) for line in lines if line.endswith(b"}")]


def _said(answer: Answer) -> dict[str, Any]:
    """Return the name and the arguments of the call, how the stream has ended, and how many tokens
    it had.
    """
    found: dict[str, Any] = {"name": "", "arguments": "", "end": "", "tokens": 0}
    for event in _events(answer):
        delta: Any = event.get("delta")
        for choice in event.get("choices", ()):
            for call in choice["delta"].get("tool_calls") or ():
                found["name"] += call["function"].get("name") or ""
                found["arguments"] += call["function"].get("arguments") or ""
            found["end"] = choice.get("finish_reason") or found["end"]
        kind = event.get("type", "")
        if kind == "response.function_call_arguments.delta":
            found["arguments"] += delta
        elif kind == "content_block_delta":
            found["arguments"] += delta.get("partial_json", "")
        elif kind == "message_delta":
            found["end"] = delta["stop_reason"]
        elif kind in {"response.completed", "response.incomplete", "response.failed"}:
            found["end"] = kind
        if kind in {"response.output_item.added", "content_block_start"}:
            found["name"] += (event.get("item") or event.get("content_block") or {}).get(
                "name"
            ) or ""
        usage = event.get("usage") or (event.get("response") or {}).get("usage") or {}
        found["tokens"] = (
            usage.get("completion_tokens") or usage.get("output_tokens") or found["tokens"]
        )
    return found


def _body(path: str) -> dict[str, Any]:
    text = f"Write a file {secrets.token_hex(6)}, with many words in it, please. " * 3
    common = {"model": MODEL, "temperature": 0, "stream": True, "tools": [TOOL[path]]}
    if path == RESPONSES:
        return common | {"input": text, "max_output_tokens": 1200}
    more = {"stream_options": {"include_usage": True}} if path == CHAT else {}
    return common | {"messages": [{"role": "user", "content": text}], "max_tokens": 1200} | more


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, str]]:
    """A plain, a prefill and a decode engine with that model and parser; and the call's
    argument.
    """
    built, model = ensure(), tmp_path_factory.mktemp("writing") / "model"
    script = Path(__file__).with_name("make_writing_model.py")
    subprocess.run([built.python, script, built.model, model], check=True)
    launcher = Launcher(dataclasses.replace(built, model=model))
    fleet = Fleet(launcher, flags="--tool-call-parser qwen3_coder")
    try:
        fleet.launch(NAMES)
        yield fleet, json.loads((model / "said.json").read_text())["content"]
    finally:
        launcher.close()
        fleet.end()


def _note(text: str) -> None:
    print(text)
    if OUT:
        with Path(OUT).open("a") as out:
            out.write(text + "\n")


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_call_with_a_long_argument(
    writers: tuple[Fleet, str], tmp_path: Path, path: str
) -> None:
    """Equal to the engine's own answer. Without the watch over engines, the same silence ends the
    stream: that is the control.
    """
    fleet, content = writers
    body = _body(path)
    alone = Silences()
    plain = await ask(fleet.plain.url, path, body, progress=alone, timeout=TIMEOUT)
    said = _said(plain)
    assert said["name"] == "write_file"
    assert json.loads(said["arguments"]) == {"content": content}
    assert len(content) >= 3000
    assert alone.longest > 2 * DEADLINE, "the engine's stream is not silent: this proves nothing"

    proxy = Proxy.start(fleet.prefills, fleet.decodes, tmp_path, settings=SETTINGS | WATCHED)
    try:
        through = Silences()
        answer = await ask(proxy.url, path, body, progress=through, timeout=TIMEOUT)
        allowed = proxy.counters().sum("pdproxy_silences_allowed_total")
        failed = proxy.counters().sum("pdproxy_leg_failures_total")
    finally:
        proxy.stop()
    assert answer.status == 200
    assert _said(answer) == said
    assert allowed >= 1
    assert failed == 0

    proxy = Proxy.start(fleet.prefills, fleet.decodes, tmp_path, settings=SETTINGS | UNWATCHED)
    try:
        cut = await ask(proxy.url, path, body)
        passed = proxy.counters().sum("pdproxy_deadline_total", wait="between_tokens")
        passed += proxy.counters().sum("pdproxy_deadline_total", wait="first_token")
    finally:
        proxy.stop()
    assert _said(cut) != said
    assert b"error" in cut.body
    assert passed == 1
    _note(
        f"{path}: {said['tokens']} tokens; longest silence {alone.longest:.1f} s of the engine, "
        f"{through.longest:.1f} s through "
        f"pdproxy; waits that went on: {allowed:.0f}; comments: "
        f"{answer.body.count(b': the engine is at work')}; "
        f"without the watch cut after {cut.seconds:.1f} s"
    )
