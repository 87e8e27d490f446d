"""Which kept turn a prompt continues, and what becomes of the others."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdproxy.deciding.kept_turns import KeptTurns, TurnLimits
from pdproxy.scheduling.ledger_engine import EngineSpec, Evidence, LedgerEngine, Role
from pdproxy.serving.kv.open_turns import MAX_NAMESAKES, MAX_OVER, WAIT, OpenTurn, OpenTurns
from pdproxy.transfer.kept_turn import SCOPE_BYTES, KeptTurn, TurnRecord, scope_of
from pdproxy.transfer.turns import DecodeHandle, TurnRules, read, shown_in_streams
from pdproxy_lab.sim.facts import SimFacts
from tests.sim.engines import Engines, plain

LIMITS = TurnLimits(
    seconds=100, count=100, max_bytes=1 << 20, max_blocks=100, min_tokens=1, min_share=0
)
SCOPE = scope_of("tiny", b"")


def node(url: str, role: Role, run: int, block_size: int = 16) -> LedgerEngine:
    made = LedgerEngine(EngineSpec(url, role), run_number=run)
    made.evidence = Evidence(frozenset({"tiny"}), "0.32.0", block_size, (), 0, 1.0)
    made.down_because = None
    return made


def params(tokens: int, name: str = "cmpl-d", block_size: int = 16, groups: int = 1) -> bytes:
    blocks = list(range(1, -(-tokens // block_size) + 1))
    return json.dumps(
        {
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [blocks] * groups,
            "remote_engine_id": "d",
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_num_tokens": tokens,
        }
    ).encode()


def text(*ids: int) -> bytes:
    return b"".join(b"%d," % one for one in ids)


class Shelf:
    """Turns of two decode engines, a clock, and what was dropped."""

    def __init__(self, by_notice: bool = True, **limits: Any) -> None:
        self.p = node("p", Role.PREFILL, 1)
        self.nodes = {"d": node("d", Role.DECODE, 2), "e": node("e", Role.DECODE, 3)}
        self.engines = {
            url: SimpleNamespace(in_ledger=one, url=url) for url, one in self.nodes.items()
        }
        self.drops: list[tuple[str, str, bool]] = []
        self.added: list[KeptTurn] = []
        self.at = 1000.0
        fields = {
            name: limits.get(name, getattr(LIMITS, name)) for name in LIMITS.__struct_fields__
        }
        self.limits = TurnLimits(**fields)
        self.kept = KeptTurns(
            TurnRules(), self.limits, cast("Any", self.engines), self.dropped, lambda: self.at
        )
        self.open = OpenTurns(
            TurnRules(),
            self,
            lambda: self.at,
            max_bytes=self.limits.max_bytes,
            by_notice=by_notice,
        )

    # -- as a keeper of turns

    def keep(self, turn: KeptTurn) -> None:
        if self.kept.add(turn):
            self.added.append(turn)

    def dropped(self, record: TurnRecord, handle: DecodeHandle | None, reason: str) -> None:
        self.drops.append((record.remote_request_id, reason, handle is not None))

    def freed(self, name: str, reason: str) -> None:
        self.kept.forget(name, reason)

    def leave_space(self, size: int) -> None:
        self.kept.leave_space(size)

    # -- for tests

    def record(self, name: str, prompt: bytes | None = None, decode: str = "d") -> TurnRecord:
        run, tokens = (
            self.nodes[decode].run_number,
            0 if prompt is None else prompt.count(b",", SCOPE_BYTES),
        )
        return TurnRecord(decode, run, "p", 1, name, "tiny", (), prompt, tokens)

    def put(self, name: str, *ids: int, decode: str = "d", scope: bytes = SCOPE) -> bool:
        handle = read(params(len(ids) - 1, f"cmpl-{name}"))
        assert isinstance(handle, DecodeHandle)
        turn = KeptTurn(
            self.record(name, decode=decode), handle, scope + text(*ids), len(ids) - 1, self.at
        )
        return self.kept.add(turn)

    def take(self, *ids: int, scope: bytes = SCOPE, without: Any = ()) -> tuple[str, int] | None:
        found = self.kept.find(scope + text(*ids), self.p, without)
        if found is None:
            return None
        self.kept.remove(found.turn)
        return found.turn.record.remote_request_id, found.tokens

    @property
    def reasons(self) -> list[tuple[str, str]]:
        return [(name, reason) for name, reason, _ in self.drops]


HISTORY = tuple(range(100, 160))
OTHER = (*HISTORY[:32], *range(500, 540))


def test_whose_turn_is_continued_is_known_before_its_prefill_engine() -> None:
    """For the choice of a revision: not where too little is in common, nor of another run."""
    shelf = Shelf(min_tokens=16)
    assert shelf.kept.keeper(SCOPE + text(*HISTORY)) is None
    shelf.put("a", *HISTORY[:40], decode="d")
    shelf.put("b", *HISTORY[:50], decode="e")
    key = SCOPE + text(*HISTORY)
    assert shelf.kept.keeper(key) == "e"
    assert len(shelf.kept) == 2
    shelf.nodes["e"].run_number = 9
    assert shelf.kept.keeper(key) == "d"
    assert shelf.kept.keeper(SCOPE + text(*HISTORY[:3], *OTHER)) is None


def test_the_one_that_is_continued_is_found_and_given_once() -> None:
    shelf = Shelf()
    shelf.put("a", *HISTORY)
    shelf.put("b", *OTHER)
    shelf.put("c", *range(900, 990))
    assert shelf.take(*HISTORY, 1, 2, 3) == ("a", 59)
    assert shelf.take(*HISTORY, 1, 2, 3) == ("b", 32)
    assert shelf.take(*HISTORY, 1, 2, 3) is None
    assert len(shelf.kept) == 1
    assert shelf.kept.blocks() == {"d": 6}
    assert shelf.drops == []


def test_ids_are_compared_whole() -> None:
    """12 is no beginning of 123."""
    shelf = Shelf()
    shelf.put("a", *range(100, 140), 12, 5, 6)
    assert shelf.take(*range(100, 140), 123, 5, 6, 7) == ("a", 32)
    shelf.put("b", *range(100, 131), 12, 7, 8)
    assert shelf.take(*range(100, 131), 123, 5) == ("b", 16)


def test_another_scope_has_other_kv() -> None:
    scopes = [
        scope_of("tiny", b""),
        scope_of("lora", b""),
        scope_of(None, b""),
        scope_of("", b""),
        scope_of("tiny", b'"salt"'),
        scope_of("tiny" + '"salt"', b""),
    ]
    assert len(set(scopes)) == len(scopes)
    shelf = Shelf()
    shelf.put("a", *HISTORY)
    assert [shelf.take(*HISTORY, 1, scope=scope) for scope in scopes[1:]] == [None] * 5
    assert shelf.take(*HISTORY, 1) is not None


@pytest.mark.parametrize(
    "limits", [{"min_share": 0.5, "min_tokens": 1}, {"min_share": 0.0, "min_tokens": 32}]
)
def test_too_little_in_common_is_left_to_its_own_conversation(limits: dict[str, Any]) -> None:
    shelf = Shelf(**limits)
    shelf.put("a", *HISTORY)
    assert shelf.take(*HISTORY[:31], *[7] * 50) is None
    assert shelf.take(*HISTORY[:20], *[7] * 50) is None
    assert shelf.take(*HISTORY[:32], *[7] * 50) == ("a", 32)


def test_the_time_counts_from_the_receipt() -> None:
    shelf = Shelf()
    shelf.put("a", *HISTORY)
    shelf.at += 99.9
    shelf.put("b", *OTHER)
    shelf.at += 0.1
    assert shelf.take(*HISTORY, 1) == ("b", 32)
    assert shelf.reasons == [("a", "expired")]


def test_a_turn_of_a_slow_stream_is_not_used_after_its_own_time() -> None:
    shelf = Shelf()
    turn = shelf.open.open(shelf.record("a", SCOPE + text(*HISTORY[:40])), in_answer=False)
    assert turn is not None
    shelf.open.receive("a", params(59))
    shelf.at += 60
    shelf.put("b", *range(900, 990))
    turn.answered(array("I", HISTORY[40:]), 20)
    shelf.at += 40
    assert shelf.take(*HISTORY, 1) is None
    assert shelf.reasons == [("a", "expired")]


def test_an_engine_that_was_started_again_or_is_gone() -> None:
    shelf = Shelf()
    for name, decode in (("a", "d"), ("b", "e")):
        shelf.put(name, *HISTORY, decode=decode)
    shelf.nodes["d"].run_number = 9
    del shelf.engines["e"]
    assert shelf.take(*HISTORY, 1) is None
    assert sorted(shelf.reasons) == [("a", "restarted"), ("b", "restarted")]
    assert len(shelf.kept) == 0


@pytest.mark.parametrize(
    "why", ["down", "block size", "version", "ejected", "paused", "unknown block size"]
)
def test_a_pair_that_may_not_share_kv(why: str) -> None:
    shelf = Shelf()
    shelf.put("a", *HISTORY)
    shelf.put("b", *OTHER, decode="e")
    d, without = shelf.nodes["d"], set()
    evidence = d.evidence
    assert evidence is not None
    if why == "down":
        d.down_because = "no answer"
    elif why == "block size":
        shelf.nodes["d"].evidence = node("d", Role.DECODE, 2, 32).evidence
    elif why == "unknown block size":
        shelf.nodes["d"].evidence = node("d", Role.DECODE, 2, cast("Any", None)).evidence
    elif why == "version":
        d.evidence = Evidence(evidence.models, "0.31.0", 16, (), 0, 1.0)
    elif why == "ejected":
        shelf.p.ejected.add("d")
    else:
        without = {2}
    assert shelf.take(*HISTORY, 1, without=without) == ("b", 32)
    assert len(shelf.kept) == 1
    assert shelf.drops == []


def test_bounds() -> None:
    shelf = Shelf(count=3)
    for number in range(5):
        shelf.put(str(number), *range(number, number + 40))
    assert shelf.reasons == [("0", "evicted"), ("1", "evicted")]
    shelf = Shelf(max_blocks=8)
    for number in range(5):
        shelf.put(str(number), *range(number, number + 40), decode="de"[number % 2])
    assert shelf.reasons == [("0", "evicted")]
    assert shelf.kept.blocks() == {"d": 6, "e": 6}
    assert not shelf.put("long", *range(200))
    assert shelf.reasons[1:] == [("long", "too_long")]
    shelf = Shelf(max_bytes=1000)
    for number in range(5):
        shelf.put(str(number), *range(number, number + 40))
        assert shelf.kept.size <= 1000
    assert len(shelf.kept) < 5
    shelf.kept.leave_space(900)
    assert len(shelf.kept) == 0


def test_equal_ones_are_all_found() -> None:
    shelf = Shelf(max_blocks=1000)
    for number in range(50):
        shelf.put(str(number), *HISTORY)
    found = {shelf.take(*HISTORY, number) for number in range(50)}
    assert len(found) == 50
    assert None not in found
    assert shelf.take(*HISTORY, 1) is None


# -- until both are known


def opened(shelf: Shelf, name: str = "a", prompt: int = 40, *, stream: bool = True) -> OpenTurn:
    turn = shelf.open.open(
        shelf.record(name, SCOPE + text(*HISTORY[:prompt])), in_answer=not stream
    )
    assert turn is not None
    return turn


ANSWER = array("I", HISTORY[40:])


@pytest.mark.parametrize("first", ["notice", "answer"])
def test_notice_and_answer_in_any_order(first: str) -> None:
    shelf = Shelf()
    turn = opened(shelf)
    if first == "answer":
        turn.answered(ANSWER, 20)
        turn.close()
    assert len(shelf.kept) == 0
    shelf.open.receive("a", params(59))
    if first == "notice":
        turn.answered(ANSWER, 20)
        turn.close()
    assert len(shelf.kept) == len(shelf.added) == 1
    assert shelf.open.size == len(shelf.open) == 0
    assert shelf.take(*HISTORY, 1) == ("a", 59)
    shelf.open.receive("a", params(59))
    assert len(shelf.kept) == 0, "a second notice of it"


@pytest.mark.parametrize("other", [False, True])
def test_the_answers_own_handle_counts(other: bool) -> None:
    """The request was sent again on a new connection: the notice was of an answer that nobody has
    got.
    """
    shelf = Shelf()
    turn = opened(shelf)
    shelf.open.receive("a", params(59, "cmpl-lost" if other else "cmpl-d"))
    turn.keeps(params(59))
    turn.answered(ANSWER, 20)
    turn.keeps(params(59, "cmpl-late"))
    assert shelf.drops == [("a", "abandoned", True)] * other
    found = shelf.kept.find(SCOPE + text(*HISTORY, 1), shelf.p)
    assert found is not None
    assert found.turn.handle.request_id == "cmpl-d"
    assert shelf.open.size == len(shelf.open) == 0


@pytest.mark.parametrize("count", [None, 19, 21])
def test_an_answer_whose_ids_are_not_all_known_leaves_its_prompt(count: int | None) -> None:
    shelf = Shelf()
    turn = opened(shelf)
    shelf.open.receive("a", params(59))
    turn.answered(ANSWER, count)
    assert shelf.take(*HISTORY, 1) == ("a", 32)


def test_an_answer_without_an_end_is_released_now_or_when_its_notice_comes() -> None:
    shelf = Shelf()
    early, late = opened(shelf, "early"), opened(shelf, "late")
    shelf.open.receive("early", params(59))
    early.close()
    late.close()
    assert shelf.drops == [("early", "abandoned", True)]
    shelf.open.receive("late", params(59))
    shelf.open.receive("late", params(59))
    assert shelf.drops[1:] == [("late", "abandoned", True)]
    assert shelf.open.size == len(shelf.kept) == 0


def test_a_notice_that_never_comes_is_not_awaited_for_ever() -> None:
    shelf = Shelf()
    opened(shelf).answered(ANSWER, 20)
    assert shelf.open.size == SCOPE_BYTES + 4 * 60
    shelf.at += WAIT
    opened(shelf, "next")
    assert shelf.drops == [("a", "no_notice", False)]
    shelf.open.receive("a", params(59))
    assert shelf.drops[1:] == [("a", "abandoned", True)]


def test_notices_of_others_change_nothing() -> None:
    """Those of another proxy's turns, or of a stranger who reaches the socket."""
    shelf = Shelf()
    for number in range(100):
        shelf.open.receive(f"other-{number}", params(59))
    assert shelf.drops == []
    assert len(shelf.open) == len(shelf.kept) == 0


@pytest.mark.parametrize(
    "params_", [b"", b"{}", b"null", b"{", params(59).replace(b"true", b"false")]
)
def test_a_notice_without_a_handle(params_: bytes) -> None:
    shelf = Shelf()
    turn = opened(shelf)
    shelf.open.receive("a", params_)
    turn.answered(ANSWER, 20)
    assert shelf.drops == [("a", "unusable", False)]
    assert shelf.open.size == 0


def test_what_cannot_be_compared_or_cut_is_released() -> None:
    shelf = Shelf()
    unknown = shelf.open.open(shelf.record("unknown"), in_answer=False)
    assert unknown is not None
    shelf.open.receive("unknown", params(59))
    unknown.answered(ANSWER, 20)
    several = opened(shelf, "several")
    shelf.open.receive("several", params(59, groups=2))
    several.answered(ANSWER, 20)
    assert shelf.drops == [("unknown", "no_ids", True), ("several", "groups", True)]


def test_two_turns_of_one_name_are_both_released() -> None:
    """Nobody knows of which one the first notice is: the second would be continued with KV of the
    first.
    """
    shelf = Shelf()
    first = opened(shelf)
    assert shelf.open.open(shelf.record("a", SCOPE + text(1)), in_answer=False) is None
    assert shelf.open.open(shelf.record("a", SCOPE + text(2), decode="e"), in_answer=False) is None
    first.answered(ANSWER, 20)
    first.close()
    assert len(shelf.open) == shelf.open.size == 0
    for _ in range(4):
        shelf.open.receive("a", params(59))
    assert shelf.drops == [("a", "abandoned", True)] * 3
    assert len(shelf.kept) == 0
    opened(shelf).answered(ANSWER, 20)
    shelf.open.receive("a", params(59))
    assert len(shelf.kept) == 1


@pytest.mark.parametrize("how", ["kept", "left"])
def test_the_name_of_a_turn_whose_handle_is_known_is_free(how: str) -> None:
    """The one notice that is to come is the other turn's."""
    shelf = Shelf()
    first = opened(shelf)
    shelf.open.receive("a", params(59, "cmpl-first"))
    if how == "kept":
        first.answered(ANSWER, 20)
    second = opened(shelf)
    shelf.open.receive("a", params(59, "cmpl-second"))
    second.answered(ANSWER, 20)
    assert shelf.drops == [("a", "evicted" if how == "kept" else "abandoned", True)]
    assert [turn.handle.request_id for turn in shelf.kept._by_age.values()] == ["cmpl-second"]


def test_a_turn_of_the_same_name_as_one_whose_client_left() -> None:
    """The notice of that one may still come."""
    shelf = Shelf()
    opened(shelf).close()
    assert shelf.open.open(shelf.record("a", SCOPE + text(1)), in_answer=False) is None
    shelf.at += WAIT
    assert shelf.open.open(shelf.record("a", SCOPE + text(1)), in_answer=False) is not None


def test_turns_of_one_name_that_are_remembered_are_bounded() -> None:
    shelf = Shelf()
    opened(shelf)
    for _ in range(3 * MAX_NAMESAKES):
        shelf.open.open(shelf.record("a", SCOPE), in_answer=False)
    for _ in range(3 * MAX_NAMESAKES):
        shelf.open.receive("a", params(59))
    assert len(shelf.drops) == MAX_NAMESAKES


def test_without_notices_the_older_turn_of_a_name_is_released_by_its_answer() -> None:
    """Each answer has its own handle: only the older one's is not kept."""
    shelf = Shelf(by_notice=False)
    first, second = (opened(shelf, stream=False) for _ in range(2))
    first.keeps(params(59))
    first.answered(ANSWER, 20)
    assert shelf.drops == [("a", "abandoned", True)]
    second.keeps(params(59))
    second.answered(ANSWER, 20)
    first.close()
    second.close()
    assert len(shelf.kept) == 1
    assert len(shelf.open) == shelf.open.size == 0


@pytest.mark.parametrize(
    ("version", "shown"),
    [
        ("0.32.0", False),
        ("0.33.0", True),
        ("0.40.1rc2", True),
        ("1.0", True),
        ("", False),
        ("dev", False),
    ],
)
def test_which_versions_show_handles_in_streams(version: str, shown: bool) -> None:
    assert shown_in_streams(version) is shown


def test_streams_without_notices_are_followed_only_if_they_show_handles() -> None:
    shelf = Shelf(by_notice=False)
    assert shelf.open.open(shelf.record("a", SCOPE), in_answer=False) is None
    turn = opened(shelf, stream=False)
    turn.answered(ANSWER, 20)
    assert len(shelf.open) == shelf.open.size == 0
    turn = opened(shelf, "b", stream=False)
    turn.keeps(params(59))
    turn.answered(ANSWER, 20)
    assert len(shelf.kept) == 1


def test_open_ones_are_bounded_and_take_space_from_those_kept() -> None:
    shelf = Shelf(max_bytes=2000)
    for number in range(4):
        shelf.put(str(number), *range(number, number + 40))
    turns = [opened(shelf, f"open-{number}") for number in range(40)]
    assert shelf.open.size <= 1000
    assert shelf.open.size + shelf.kept.size <= 2000
    assert len(shelf.open) == 40, "those without space are known by name: they are released"
    for turn in turns:
        turn.close()
    assert shelf.open.size == 0
    for number in range(MAX_OVER + 10):
        opened(shelf, f"more-{number}").close()
    assert len(shelf.open._over) == MAX_OVER


# -- any edits of a history, and what engines make of it

EDIT = st.tuples(
    st.sampled_from(["cut", "insert", "delete", "replace"]), st.integers(0, 80), st.integers(1, 12)
)


def edited(history: tuple[int, ...], edits: list[tuple[str, int, int]]) -> tuple[int, ...]:
    ids = list(history)
    for kind, at, count in edits:
        at = min(at, len(ids))
        if kind == "cut":
            del ids[at:]
        elif kind == "insert":
            ids[at:at] = range(700, 700 + count)
        elif kind == "delete":
            del ids[at : at + count]
        else:
            ids[at : at + count] = [at_ + 1 for at_ in ids[at : at + count]]
    return tuple(ids)


@given(
    length=st.integers(2, 60),
    tokens=st.integers(2, 30),
    edits=st.lists(EDIT, max_size=3),
    more=st.integers(0, 40),
    block_size=st.sampled_from([4, 16]),
    forgets=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_whatever_was_edited_the_text_is_one_engines(
    length: int, tokens: int, edits: list[Any], more: int, block_size: int, forgets: bool
) -> None:
    """Never more than the common blocks are used, and P and D say what one engine says."""
    facts: dict[str, Any] = {
        "block_size": block_size,
        "bidirectional_kv_xfer": True,
        "kv_recompute_threshold": 1,
    }
    facts["max_model_len"] = 400
    engines = Engines()
    p, d = (
        engines.add(SimFacts(role="prefill", **facts)),
        engines.add(SimFacts(role="decode", **facts)),
    )
    prompt = tuple(range(300, 300 + length))
    run = engines.answer(d, prompt, tokens, engines.handle(p, prompt))
    history = (*prompt, *run.tokens)
    shelf = Shelf()
    for one in (shelf.p, shelf.nodes["d"]):
        one.evidence = node("x", Role.DECODE, 0, block_size).evidence
    turn = shelf.open.open(shelf.record("a", SCOPE + text(*prompt)), in_answer=True)
    assert turn is not None
    turn.keeps(json.dumps(run.handle).encode())
    turn.answered(array("I", run.tokens), tokens)
    if forgets:
        p.core.pool.forget_all()
    following = (*edited(history, edits), *range(1000, 1000 + more))
    if not following:
        return
    reuse = shelf.kept.find(SCOPE + text(*following), shelf.p)
    common = next(
        (at for at, (a, b) in enumerate(zip(history, following, strict=False)) if a != b),
        min(len(history), len(following)),
    )
    if reuse is not None:
        whole = len(history) - 1
        assert reuse.tokens <= min(common, len(following) - 1)
        assert reuse.tokens == whole or reuse.tokens % block_size == 0
    else:
        assert min(common, len(following) - 1) < block_size
    kv = {"do_remote_decode": True} if reuse is None else json.loads(reuse.params)
    prefill = engines.answer(p, following, 1, kv)
    assert prefill.over == "length"
    assert engines.answer(d, following, 6, prefill.handle).tokens == plain(following, 6, **facts)
    assert engines.answer(p, following, 6).tokens == plain(following, 6, **facts), (
        "P's cache is sound"
    )


def test_a_handle_that_came_before_an_unusable_one_is_released() -> None:
    """The notice's, whose answer is not the one that the client gets."""
    shelf = Shelf()
    turn = opened(shelf)
    shelf.open.receive("a", params(59, "cmpl-lost"))
    turn.keeps(b"{}")
    assert shelf.drops == [("a", "unusable", True)]
    turn.answered(ANSWER, 20)
    assert shelf.open.size == len(shelf.open) == len(shelf.kept) == 0
