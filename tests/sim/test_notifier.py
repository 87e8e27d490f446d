"""What the notifier tells of NIXL's KV, in virtual time."""

import msgspec
import pytest

from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.notifier import external
from tests.sim.engines import PREFILL, PROMPT, Engines

NOTIFY = "tcp://127.0.0.1:7500"
NAME = "cmpl-req-1-0-abcdef01"


class Pair(Engines):
    """P and D, both of which tell."""

    def __init__(self, **facts):
        super().__init__()
        self.p = self.add(SimFacts(role="prefill", notify=NOTIFY, **facts))
        self.d = self.add(SimFacts(role="decode", notify=NOTIFY, **facts))

    def messages(self):
        """Everybody's notices in their order, decode's before prefill's of the same instant."""
        found = [
            (time, tell.message) for engine in (self.d, self.p) for time, tell in engine.notices
        ]
        return [message for _, message in sorted(found, key=lambda one: one[0])]

    def prefill(self, **more):
        return self.answer(self.p, PROMPT, 1, dict(PREFILL), id=NAME, **more)


def events(pair):
    return [(one["role"], one["event"]) for one in pair.messages()]


def test_a_transfer_as_recorded():
    """Recorded: held, load_done, released, in this order."""
    pair = Pair()
    handle = pair.prefill().handle
    pair.answer(pair.d, PROMPT, 2, handle, id="cmpl-other-0-00000000")
    assert events(pair) == [("P", "ready"), ("D", "loaded"), ("P", "released")]
    ready, loaded, released = pair.messages()
    assert msgspec.json.decode(ready.pop("params")) == handle
    assert msgspec.json.decode(ready.pop("prompt_ids")) == list(PROMPT)
    head = {"type": "PdproxyKV", "v": 1, "req_id": "req-1", "remote_req_id": NAME}
    p = head | {"internal_id": NAME, "engine_id": "engine-0", "role": "P"}
    assert ready == p | {"event": "ready", "tokens": 100, "cached": 0, "created": 96, "blocks": 7}
    assert 0 < loaded.pop("seconds") < 0.1
    d = head | {"internal_id": "cmpl-other-0-00000000", "engine_id": "engine-1", "role": "D"}
    assert loaded == d | {
        "event": "loaded",
        "tokens": 100,
        "cached": 0,
        "blocks": 7,
        "bytes": 100 * 131_072,
    }
    assert 0 < released.pop("seconds") < 2
    assert released == p | {"event": "released"}


def test_what_decode_has_is_loaded_at_once():
    """Recorded: a repeat pulls what its own cache lacks; with all of it here vLLM itself has no
    event.
    """
    pair = Pair()
    pair.answer(pair.d, PROMPT, 2)
    handle = pair.prefill().handle
    pair.answer(pair.d, PROMPT, 2, handle)
    assert [
        (one["tokens"], one["cached"]) for one in pair.messages() if one["event"] == "loaded"
    ] == [(4, 96)]


def test_a_pull_that_fails():
    pair = Pair()
    handle = pair.prefill().handle
    pair.answer(pair.d, PROMPT, 2, handle | {"remote_engine_id": "nobody"})
    assert events(pair) == [("P", "ready"), ("D", "failed")]


def test_a_lease_that_ends():
    pair = Pair()
    pair.prefill()
    pair.run(pair.now + 31)
    assert events(pair) == [("P", "ready"), ("P", "expired")]
    assert pair.messages()[-1]["reason"] == "1 worker(s)"
    assert pair.messages()[-1]["seconds"] == pytest.approx(30)


def test_a_prefill_that_is_aborted_holds_nothing():
    pair = Pair()
    pair.ask(pair.p, PROMPT, 8, dict(PREFILL), id=NAME)
    pair.abort(pair.p, NAME)
    assert events(pair) == [("P", "failed")]
    assert pair.messages()[0]["reason"] == "FINISHED_ABORTED"


def test_a_handle_given_back_is_released():
    pair = Pair()
    handle = pair.prefill().handle
    pair.ask(pair.d, PROMPT, 2, handle, id="x")
    pair.abort(pair.d, "x")
    pair.run(pair.now + 1)
    assert ("P", "released") in events(pair)


def test_requests_without_a_transfer_are_not_told_of():
    pair = Pair()
    pair.answer(pair.p)
    pair.answer(pair.d)
    assert pair.messages() == []


def test_engines_without_an_address_tell_nothing():
    engines = Engines()
    p, d = engines.add(SimFacts(role="prefill")), engines.add(SimFacts(role="decode"))
    engines.answer(d, PROMPT, 2, engines.handle(p))
    assert (p.notices, d.notices) == ([], [])


@pytest.mark.parametrize(
    ("internal", "name"),
    [
        (NAME, "req-1"),
        ("chatcmpl-a-b-0-abcdef01", "a-b-0"),
        ("chatcmpl-a-abcdef01", "a"),
        ("request-1", "request-1"),
    ],
)
def test_ids(internal, name):
    assert external(internal) == name


def test_the_proxys_decoder_reads_them():
    notices = pytest.importorskip("pdproxy.wire.notices")
    pair = Pair()
    pair.answer(pair.d, PROMPT, 2, pair.prefill().handle)
    found = [notices.decode(msgspec.msgpack.encode(message)) for message in pair.messages()]
    assert [one.event.value for one in found] == ["ready", "loaded", "released"]
    assert {one.request_id for one in found} == {"req-1"}
