"""The tasks that must run for as long as the process: each of them may fail, and is started again
where an operator sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pdproxy.kit.tasks import Pauses
from pdproxy.settings.health import OutlierSettings
from pdproxy.settings.schema import Settings
from pdproxy.wire.notices import Notice
from tests.fakes.pool import pool
from tests.fakes.tokenizer import Shelf, SimTokenizer
from tests.fakes.world import COMPLETIONS, World, completion, until, world

FAILURES = 3
SECRET = "PROMPTSECRET"


def tokenizing(settings: Settings) -> Settings:
    """The same settings, with all prompts tokenized here, and engines that are compared."""
    (pool,) = settings.pools
    changed = msgspec.structs.replace(pool, tokenize="always", tokenizer="model")
    return msgspec.structs.replace(settings, pools=(changed,), outliers=OutlierSettings())


def owners(w: World) -> dict[str, tuple[Any, str]]:
    """For each such task what runs it: an object, and the name of a method that never returns."""
    assert w.proxy.tokens is not None
    probes = {f"probe {engine.url}": (w.proxy.prober, "run") for engine in w.proxy.ledger.engines}
    return {
        "follow files": (w.proxy.credentials, "follow"),
        "canaries": (w.proxy.tokens.canaries, "run"),
        "outliers": (w.proxy.exclusions, "run"),
        **probes,
    }


class Failing:
    """Has a method fail a few times before it does what it did."""

    def __init__(self, owner: Any, name: str, only: object = None) -> None:
        self.runs = 0
        self._run = getattr(owner, name)
        self._only = only
        setattr(owner, name, self)

    async def __call__(self, *arguments: object) -> None:
        """One run. `only`: the argument with which it fails."""
        if self._only is None or arguments == (self._only,):
            self.runs += 1
            if self.runs <= FAILURES:
                raise ValueError(SECRET)
        await self._run(*arguments)


@pytest.mark.parametrize("which", ["follow files", "canaries", "outliers", "probe"])
async def test_each_task_is_started_again(
    which: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails three times and works from then on: counted, in /ready until it has run well for a
    while, in the log by place.
    """
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    made: list[tuple[str, Failing]] = []
    seconds = 0.0

    def before(w: World) -> None:
        w.proxy.tasks._pauses = Pauses(first=0.001, longest=0.004)
        w.proxy.tasks._now = lambda: seconds
        name = next(name for name in owners(w) if name.startswith(which))
        only = next(iter(w.proxy.engines.values())) if which == "probe" else None
        made.append((name, Failing(*owners(w)[name], only)))

    settings: dict[str, Any] = {"adjust": tokenizing, "library": Shelf(model=SimTokenizer())}
    async with world(before=before, auth={"api_keys_file": str(keys)}, **settings) as w:
        ((name, failing),) = made
        await until(lambda: failing.runs == FAILURES + 1)
        answer = await w.get("/ready")
        assert answer.status == 200
        (detail,) = [line for line in answer.json["details"] if "background task" in line]
        assert f"background task {name} has failed 3 times, the last time by ValueError" in detail
        assert w.metric("pdproxy_task_restarts_total", task=name) == FAILURES
        assert (
            await w.ask(COMPLETIONS, completion(), [("authorization", "Bearer sk-one")])
        ).status == 200
        assert w.proxy.tasks.shortcomings()
        seconds = Pauses().well
        assert not w.proxy.tasks.shortcomings()
        assert not [
            line for line in (await w.get("/ready")).json["details"] if "background task" in line
        ]
        assert w.metric("pdproxy_task_restarts_total", task=name) == FAILURES
        assert failing.runs == FAILURES + 1
    lines = [one.getMessage() for one in caplog.records if "background task" in one.getMessage()]
    assert len(lines) == FAILURES
    assert all("ValueError at " in line for line in lines)
    assert SECRET not in caplog.text


async def test_no_other_task_must_always_run(tmp_path: Path) -> None:
    """All of a proxy's tasks are among those that are started again: a new one belongs into the
    test above.
    """
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    async with world(
        auth={"api_keys_file": str(keys)}, adjust=tokenizing, library=Shelf(model=SimTokenizer())
    ) as w:
        assert {name for name, _ in w.proxy.tasks.failures()} == {
            *owners(w),
            "deadlines",
            "notices",
        }
        assert len(w.proxy.tasks) == len(owners(w))


async def test_a_notice_that_can_not_be_handled() -> None:
    """What fails at one message leaves those behind it: they are received, and the failure is in
    /ready.
    """
    async with pool("lmcache-pd") as p:
        proxy = p.world.proxy
        received: list[str] = []

        def fail_once(then: Callable[[Notice], None]) -> Callable[[Notice], None]:
            def take(notice: Notice) -> None:
                received.append(notice.request_id)
                if len(received) == 1:
                    raise ValueError(SECRET)
                then(notice)

            return take

        proxy.notices.socket._received = fail_once(proxy.notices.socket._received)
        assert proxy.notices.socket.address is not None
        with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
            sender.setsockopt(zmq.LINGER, 5000)
            sender.connect(proxy.notices.socket.address)
            for number in range(3):
                sender.send(msgspec.msgpack.encode({"req_id": f"leg-{number}"}))
            await until(lambda: len(received) == 3)
        assert p.world.metric("pdproxy_task_restarts_total", task="notices") == 1
        (detail,) = [
            line
            for line in (await p.world.get("/ready")).json["details"]
            if "background task" in line
        ]
        assert (
            "background task notices has failed 1 times, the last time by ValueError, and has "
            "continued for" in detail
        )
        assert SECRET not in detail
