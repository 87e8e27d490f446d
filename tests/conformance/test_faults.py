"""Each check fails when what it claims to notice is so, in the engines or in the proxy itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from pdproxy.serving.dispatch import exchange
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.kv.ready import ReadyWaits
from pdproxy.serving.request import service
from pdproxy.serving.stream.relay import Relay
from pdproxy.transfer import bodies, nixl
from pdproxy.wire import fields, inside
from pdproxy_lab.conformance.check import Check
from pdproxy_lab.conformance.checks import CHECKS
from pdproxy_lab.conformance.results import Result
from pdproxy_lab.conformance.runner import run
from pdproxy_lab.sim.ec_connector import EncoderOutput
from pdproxy_lab.sim.folder import OutputFolder
from pdproxy_lab.sim.memory import EMPTY
from pdproxy_lab.sim.nixl_link import NixlLink
from tests.conformance.engines import BRISK, Rig, exactly, rig

Inject = Callable[[Rig, pytest.MonkeyPatch], None]


# -- what can be wrong


def empty_pages(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """KV arrives wrong: the counters are content, the text is not."""
    (link,) = engines.p.engine._links
    assert isinstance(link, NixlLink)
    read = link.read
    patch.setattr(link, "read", lambda blocks: [EMPTY for _ in read(blocks)])


def keeps_blocks(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """P doesn't hear that D is done."""
    (link,) = engines.p.engine._links
    patch.setattr(link, "notified", lambda kind, ids: None)


def ignores_aborts(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """An engine goes on for clients that have left."""
    patch.setattr(engines.d.engine._core, "abort", lambda *_: None)
    patch.setattr(engines.p.engine._core, "abort", lambda *_: None)


def hangs(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """D takes requests and never answers those with KV."""
    engines.d.faults.add("stall@handed_over:rate=1")


def says(fault: str) -> Inject:
    """P tells wrongly."""

    def inject(engines: Rig, patch: pytest.MonkeyPatch) -> None:
        engines.p.faults.add(fault)

    return inject


def encodes_wrongly(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """What the encoder engine stores is not the picture's."""
    put = OutputFolder.put

    def other(self: OutputFolder, identifier: str, output: EncoderOutput) -> None:
        put(self, identifier, msgspec.structs.replace(output, content=output.content + 1))

    patch.setattr(OutputFolder, "put", other)


def encodes_nothing(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """The encoder engine is broken: P encodes the picture."""
    assert engines.e is not None
    engines.e.faults.add("status:rate=1")


def client_handles_pass(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """The proxy lets a client's own handle through."""
    patch.setattr(fields, "strip_handles", lambda fields: None)


def splits_all(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """The proxy splits short prompts."""
    patch.setattr(exchange, "why_alone", lambda *_, **__: None)


def shows_ids(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """The proxy leaves the ids in that it has asked for."""
    patch.setattr(service, "Relay", lambda **kinds: Relay(**{**kinds, "takes_ids": False}))


def shows_handles(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """The proxy leaves a decode engine's handle in."""
    patch.setattr(inside, "without_inside", lambda body: (body, None))


def hides_ids(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """The proxy asks for no ids though the client does."""
    fields = bodies.decode_fields
    patch.setattr(
        nixl,
        "decode_fields",
        lambda *args: {**fields(*args), "return_token_ids": msgspec.Raw(b"false")},
    )


def two_tokens(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """D makes more than it is asked for."""
    fields = bodies.decode_fields
    patch.setattr(
        nixl, "decode_fields", lambda *args: {**fields(*args), "max_tokens": msgspec.Raw(b"2")}
    )


def does_not_wait(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """The proxy asks D at once."""

    async def kv_ready(self: Attempt, request: PromptRequest) -> None:
        return None

    patch.setattr(Attempt, "kv_ready", kv_ready)


def waits_for_ever(engines: Rig, patch: pytest.MonkeyPatch) -> None:
    """The proxy has no deadline for notices."""
    wait = ReadyWaits.wait

    async def patient(self: ReadyWaits, expected: Any, timeout: float, engine: str) -> bool:
        return await wait(self, expected, 3600, engine)

    patch.setattr(ReadyWaits, "wait", patient)


@dataclass(frozen=True)
class Wrong:
    """A fault, the check that must fail of it, and what it must say."""

    check: str
    words: str
    inject: Inject | None = None
    how: dict[str, Any] = field(default_factory=dict)
    verdict: str = "failed"


NO_PULL: dict[str, Any] = {"d": {"connector": "none"}}
PD: dict[str, Any] = {"connector": "lmcache-pd", "ranks": 2}
MP: dict[str, Any] = {"connector": "lmcache-mp", "ranks": 2}
KEEPS = {"version": "0.33.0", "bidirectional_kv_xfer": True}
NEW: dict[str, Any] = {"p": KEEPS, "d": KEEPS}
"""Whole answers and last events have handles."""
SOON: dict[str, Any] = {"deadlines": {"kv_ready": 1}}
WRONG = [
    Wrong("pair", "different versions", how={"p": {"version": "0.31.0"}}),
    Wrong("pair", "no connection", says("refuse")),
    Wrong("kv_moved", "it computed the others itself", how=NO_PULL),
    Wrong("kv_moved", "one engine alone: no_handle", how={"p": {"connector": "none"}}),
    Wrong("kv_moved", "while waiting for a completion through the proxy", hangs),
    Wrong(
        "kv_moved",
        "it computed the others itself",
        how={"connector": "shared", "d": {"connector": "none"}},
    ),
    Wrong("short_prompt", "was given to P", splits_all),
    Wrong("completion", "token ids differ from D alone", empty_pages),
    Wrong(
        "completion",
        "token ids differ from the plain engine",
        how={"p": {"weights": 1}, "d": {"weights": 1}},
    ),
    Wrong("completion", "computed the prompt itself", how=NO_PULL, verdict="not_judged"),
    Wrong("completion_stream", "token ids differ from D alone", empty_pages),
    Wrong("completion_stream", "while waiting for a streamed completion through the proxy", hangs),
    Wrong("completion", "it has the fields kv_transfer_params", shows_handles, NEW),
    Wrong("completion_stream", "it has the fields kv_transfer_params", shows_handles, NEW),
    Wrong("chat_stream", "it has the fields kv_transfer_params", shows_handles, NEW),
    Wrong("chat", "token ids differ from D alone", empty_pages),
    Wrong("chat_stream", "token ids differ from D alone", empty_pages),
    Wrong("response", "text is", empty_pages),
    Wrong("response_stream", "text is", empty_pages),
    Wrong("response", "computed the prompt itself", how=NO_PULL, verdict="not_judged"),
    Wrong("message", "text is", empty_pages),
    Wrong("message_stream", "text is", empty_pages),
    Wrong("message", "one engine alone: no_handle", how={"p": {"connector": "none"}}),
    Wrong("picture", "token ids differ from D alone", encodes_wrongly, {"encodes": True}),
    Wrong("picture", "failed, failed (", encodes_nothing, {"encodes": True}),
    Wrong("one_token", "token ids differ from D alone", empty_pages),
    Wrong("one_token", "completion_tokens is 2", two_tokens),
    Wrong("ids_in_stream", "without return_token_ids has ids", shows_ids),
    Wrong("ids_in_stream", "has 0 ids", hides_ids),
    Wrong("wrong_handle", "ec_transfer_params reached", client_handles_pass),
    Wrong(
        "wrong_handle", "ec_transfer_params reached", client_handles_pass, {"connector": "shared"}
    ),
    Wrong(
        "notice_each_rank",
        "ranks that sent none: unnamed",
        says("lost_notice:rank=1,rate=1"),
        {**PD, **SOON},
    ),
    Wrong(
        "notice_each_rank",
        "ranks that sent none: 1",
        says("lost_notice:rank=1,rate=1"),
        {**MP, **SOON},
    ),
    Wrong("notice_each_rank", "some were sent twice", says("double_notice:rate=1"), MP),
    Wrong(
        "notice_each_rank", "no notice was ready", says("lost_notice:rate=1"), {"notifier": True}
    ),
    Wrong("notice_wait", "before the notices had come", does_not_wait, PD),
    Wrong("notice_wait", "before the notices had come", does_not_wait, MP),
    Wrong("notice_missing", "while waiting for a completion through the proxy", waits_for_ever, PD),
    Wrong("notice_missing", "did not wait for notices", does_not_wait, MP),
    Wrong(
        "notice_missing",
        "on_timeout is fail, but without",
        does_not_wait,
        {**MP, "kv_ready": {"on_timeout": "fail"}},
    ),
    Wrong("leave_prefill", "P still holds KV", keeps_blocks, {"lease": 60}),
    Wrong("leave_prefill", "freed only by the end of its lease", keeps_blocks, {"lease": 0.5}),
    Wrong("leave_decode", "still holds KV", keeps_blocks, {"lease": 60}),
    Wrong("leave_decode", "one engine alone", how={"p": {"connector": "none"}}),
    Wrong("leave_stream", "D still holds KV", ignores_aborts, {"speed": 0.5}),
    Wrong("release", "P still holds the KV", keeps_blocks, {"lease": 60}),
    Wrong("release", "returns no usable handle", how={"p": {"connector": "none"}}),
    Wrong("lease", "P held the KV for all of 1 s", how={"lease": 60, "said_lease": 0.5}),
    Wrong(
        "lease",
        "--lease-watch 1 is too short: P's lease is 30 s",
        how={"lease": 60},
        verdict="not_judged",
    ),
    Wrong("nothing_left", "P still holds KV", keeps_blocks, {"lease": 60}),
]


def named(wrong: Wrong) -> Any:
    """A parameter of a test."""
    on_purpose = pytest.mark.names_engines("the proxy is broken here on purpose")
    marks = [on_purpose] if wrong.inject is shows_handles else []
    return pytest.param(wrong, marks=marks, id=f"{wrong.check}: {wrong.words}")


@pytest.mark.parametrize("wrong", [named(one) for one in WRONG])
async def test_a_check_fails_of_its_fault(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(**wrong.how) as engines:
        if wrong.inject is not None:
            wrong.inject(engines, monkeypatch)
        names = [wrong.check] if wrong.check != "nothing_left" else ["completion", "nothing_left"]
        # A check that hangs is given up sooner than others, but late enough for all that comes
        # before on a slow machine.
        seconds = 4.0 if wrong.words.startswith("while waiting") else None
        results = await engines.judge(*names, plain="plain" in wrong.words, seconds=seconds)
        found = results[wrong.check]
        assert found.verdict == wrong.verdict, found
        assert wrong.words in found.says


def test_every_check_has_a_fault_that_fails_it() -> None:
    assert {one.check for one in WRONG if one.verdict == "failed"} == {
        check.name for check in CHECKS
    }


async def test_an_engine_that_was_restarted_is_noticed() -> None:
    async with rig() as engines:

        async def restart(_: object) -> str:
            await engines.p.restart()
            return "restarted"

        checks = [check for check in CHECKS if check.name in ("pair", "nothing_left")]
        checks.insert(1, Check("restart", "", restart))
        results = (await run(engines.settings, BRISK, checks)).pairs[0].results
        assert results[-1].verdict == "failed"
        assert "restarted during the run" in results[-1].says


async def test_what_depends_on_a_pair_is_not_judged_without_one() -> None:
    async with rig(p={"version": "0.31.0"}) as engines:
        results = await engines.judge()
        assert results.pop("pair").verdict == "failed"
        assert {result.verdict for result in results.values()} == {"not_judged"}


async def test_a_check_that_does_not_end_fails() -> None:
    async with rig() as engines:

        async def never(_: object) -> str:
            await asyncio.Event().wait()
            return ""

        pair = next(check for check in CHECKS if check.name == "pair")
        never_ends = Check("never", "", never, takes=exactly(1))
        results = (await run(engines.settings, BRISK, [pair, never_ends])).pairs[0].results
        assert results[1].verdict == "failed"
        assert "not complete after 1 s" in results[1].says


async def test_others_traffic_makes_usage_unjudgeable() -> None:
    async with rig() as engines:
        engines.d.engine.stats.waiting = 1
        results: dict[str, Result] = await engines.judge("leave_stream")
        assert results["leave_stream"].verdict == "not_judged"
        assert "from others" in results["leave_stream"].says
