"""`pdproxy requests` and `pdproxy why`: where the time of a request went, and why it went to its
engines.
"""

from __future__ import annotations

import asyncio
import json
import os
import re

import pytest

from pdproxy.cli.main import main
from pdproxy.cli.phases import phases
from pdproxy.observe.weighed import Option, Weighed
from tests.fakes import scripts
from tests.fakes.admin import Admin, admin
from tests.fakes.engine import serve
from tests.fakes.placement import install, placed_world, scripted, split, whole
from tests.fakes.world import COMPLETIONS, completion, until, world
from tests.proxy.test_engines_command import ended


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    for name in [name for name in os.environ if name.startswith("PDPROXY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")


class Command:
    """Runs a command line against a world, in a thread."""

    def __init__(self, api: Admin, capsys: pytest.CaptureFixture[str]) -> None:
        self._address = f"127.0.0.1:{api.port}"
        self._capsys = capsys

    async def __call__(self, *words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(main, [*words, "--admin", self._address])
        return code, *self._capsys.readouterr()


WEIGHED = Weighed(
    Option(0.5, 0.125, 0.008, 0.25, 0.25, 0.0, 0.0, 0.0, 0),
    Option(1.0, 0.25, 0.01, 0.375, 0.5, 0.125, 0.0, 0.0, 0),
    ("http://1",),
)


async def test_the_course_of_a_request(capsys: pytest.CaptureFixture[str]) -> None:
    """Each decision with its numbers and each failed leg, in their order; the phases of the last
    attempt; and what ended it.
    """
    async with placed_world(1, 2) as w, admin(w) as api:
        run = Command(api, capsys)
        placement = scripted(w)
        placement.choices.extend([split(0, 0, "ttft", WEIGHED), whole(1, "load")])
        w.decode[0].script(scripts.whole(b'{"error": {"message": "out of memory"}}', 500))
        answer = await w.ask(COMPLETIONS, completion(), [("X-Request-Id", "mine")])
        assert answer.status == 200
        p, (first, second) = w.prefill[0].url, [one.url for one in w.decode]
        await until(lambda: not api.running)
        code, out, err = await run("why", "mine")
        assert (code, err) == (0, "")
        assert out.startswith("mine: ok, 200, ")
        lines = out.splitlines()[out.splitlines().index("") + 1 :]
        assert re.fullmatch(
            f"attempt 1: split {p} -> {first}, reason ttft: (prompt tokens [0-9]+, )?"
            f"ttft 0.125, tpot 0.008, cost 0.5, cached 0",
            lines.pop(0),
        )
        assert lines[0] == (
            "  next best: whole http://1: ttft 0.25, tpot 0.01, cost 1, cached 0; tpot made the "
            "difference (its part of the cost: 0.25 here, 0.5 there)"
        )
        assert re.match(f"  at [0-9.]+ m?s: decode at {first} failed, tried again: ", lines[1])
        assert lines[2].startswith(f"attempt 2: whole {second}, reason load")
        assert lines[3].startswith("one engine: decided (the placement chose one engine")
        assert out.endswith("ended: ok, 200\n  ok: answered\n")
        code, out, _ = await run("requests", "mine")
        assert code == 0
        assert "2 attempts; the phases are those of the last one" in out
        assert re.search(rf"^alone_whole +[0-9.]+ m?s +#+ +{second}$", out, re.MULTILINE)
        code, out, _ = await run("requests")
        assert code == 0
        assert out.splitlines()[2].split()[0] == "mine"
        assert max(map(len, out.splitlines())) <= 80
        code, out, _ = await run("why", "mine", "--json")
        assert [one["choice"] for one in json.loads(out)["decisions"]] == ["whole", "split"]


async def test_one_that_runs_and_one_that_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a placement the policy chose; what a request waits for goes on."""
    async with world(decode=1) as w, admin(w) as api:
        run = Command(api, capsys)
        go = asyncio.Event()
        w.decode[0].script(scripts.gate(go, serve))
        client = await w.client()
        client.post(COMPLETIONS, completion(stream=True), [("X-Request-Id", "slow")])
        await until(lambda: bool(w.decode[0].requests))
        code, out, _ = await run("requests", "slow")
        assert code == 0
        assert out.startswith("slow: running (working) for ")
        assert re.search(rf"^kv +[0-9.]+ m?s \.\.\. +#+ +{w.decode[0].url}$", out, re.MULTILINE)
        code, out, _ = await run("why", "slow")
        assert f"attempt 1: split {w.prefill[0].url} -> {w.decode[0].url}\n" in out
        assert "its pool has no placement: the policy chose\nit runs\n" in out
        assert (await run("requests", "--outcome", "running", "--json"))[0] == 0
        go.set()
        assert (await w.ask(COMPLETIONS, b"{", [("X-Request-Id", "bad")])).status == 400
        code, out, _ = await run("why", "bad")
        assert code == 0
        assert "ended: client, 400: " in out
        assert "  client: the request was refused: it is wrong" in out


async def test_what_is_not_known_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async with world() as w, admin(w) as api:
        run = Command(api, capsys)
        for words in (["requests", "a\x1bb"], ["why", "a\x1bb"]):
            code, out, err = await run(*words)
            assert (code, out, err.count("\n")) == (1, "", 1)
            assert (
                "no request with the id a?b is known: those that run are, and the last 256" in err
            )
        for words, text in (
            (["requests", "x", "--outcome", "ok"], "--outcome: has no effect with an ID"),
            (["requests", "--limit", "257"], "--limit: expected 1 to 256, got '257'"),
        ):
            code, _, err = await run(*words)
            assert code == 2
            assert text in err
    for command in ("requests", "why"):
        assert main([command, "x"]) == 2
        assert "listen.admin in the settings (off by default)" in capsys.readouterr().err


def test_phases_follow_each_other() -> None:
    """All that no phase has is before the last attempt; of a list of prompts that is not known."""
    found = ended(0.0, queue_s=0.25, total_s=2.0, prompt_fields={"tokenize_s": 0.05})
    shown = phases(found, found.prompts[0])
    assert [(one.name, one.begin, round(one.seconds, 6), one.engine) for one in shown] == [
        ("queue", 0.0, 0.25, None),
        ("tokenize", 0.25, 0.05, None),
        ("other", 0.3, 0.1, None),
        ("prefill", pytest.approx(0.4), 0.2, "p"),
        ("kv", pytest.approx(0.6), 0.4, "d"),
        ("decode", pytest.approx(1.0), 1.0, "d"),
    ]
    several = ended(0.0, total_s=9.0, prompt_count=2)
    assert "other" not in [one.name for one in phases(several, several.prompts[0])]
    waiting = ended(0.0, outcome="running", phase="waiting", total_s=3.0)
    assert phases(waiting, None) == [("queue", 0.0, 3.0, None, True)]
