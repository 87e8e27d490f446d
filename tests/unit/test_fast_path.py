"""The fast path alone: what it learns from a stream, what it forwards of a read, and what it
leaves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.serving.stream.fast_path import MAX_SENT, FastPath
from pdproxy.wire import tokens
from pdproxy.wire.chunks import MAX_CHUNK, chunk, whole_chunks
from pdproxy.wire.event_template import EventTemplates

TIGHT, SPACED = (",", ":"), (", ", ": ")
FORMS = ["text", "content", "reasoning"]


def event(
    text: str,
    ids: Sequence[int] | None = (7,),
    *,
    form: str = "text",
    style: tuple[str, str] = TIGHT,
    ascii_only: bool = False,
    finish: str | None = None,
    **more: object,
) -> bytes:
    """Return an event as an engine writes it; `more` are fields beside its choices."""
    held = {"text": text} if form == "text" else {"delta": {form: text}}
    choice = {
        "index": 0,
        **held,
        "logprobs": None,
        "finish_reason": finish,
        "token_ids": ids and list(ids),
    }
    body = {
        "id": "cmpl-1",
        "object": "o",
        "created": 1,
        "model": "text",
        "choices": [choice],
        **more,
    }
    return (
        b"data: " + json.dumps(body, separators=style, ensure_ascii=ascii_only).encode() + b"\n\n"
    )


def opened(*, takes_ids: bool = True) -> tuple[FastPath, list[bytes]]:
    """Return the path of a stream that flows, and what its client gets."""
    got: list[bytes] = []
    ticks = count(1)
    path = FastPath(lambda: next(ticks) / 100, EventTemplates(), takes_ids=takes_ids)
    path.write_to(got.append)
    path.enabled = True
    path.count(1, 0.0)
    return path, got


def taught(first: bytes, *, takes_ids: bool = True) -> tuple[FastPath, list[bytes]]:
    """Return a path that has learned the form of `first`."""
    path, got = opened(takes_ids=takes_ids)
    path.forward(chunk(first))
    got.clear()
    return path, got


def payloads(written: Sequence[bytes]) -> list[bytes]:
    """Return the events of whole chunks."""
    found, end = whole_chunks(b"".join(written))
    assert end == sum(map(len, written))
    return found


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
events = st.lists(st.tuples(texts, st.integers(0, 99_999_999)), min_size=1, max_size=6)


@pytest.mark.parametrize("style", [TIGHT, SPACED])
@pytest.mark.parametrize("form", FORMS)
@given(events, st.booleans(), st.booleans())
def test_plain_events_go_on_without_their_ids(
    form: str, style: tuple[str, str], told: list[tuple[str, int]], ascii_only: bool, together: bool
) -> None:
    sent = [event(text, [one], form=form, style=style, ascii_only=ascii_only) for text, one in told]
    plain = [event(text, None, form=form, style=style, ascii_only=ascii_only) for text, _ in told]
    path, got = taught(event("x", [3], form=form, style=style))
    known = len(path.ids)
    reads = [b"".join(map(chunk, sent))] if together else [*map(chunk, sent)]
    assert [path.forward(read) for read in reads] == [len(read) for read in reads]
    assert payloads(got) == plain
    assert list(path.ids)[known:] == [one for _, one in told]


@given(events)
def test_events_of_a_stream_whose_client_wants_its_ids_go_on_as_they_are(
    told: list[tuple[str, int]],
) -> None:
    sent = b"".join(chunk(event(text, None)) for text, _ in told)
    path, got = taught(event("x", None), takes_ids=False)
    assert path.forward(sent) == len(sent)
    assert b"".join(got) == sent


STRANGE = {
    "a finish": event("a", finish="stop"),
    "a finish that was given up": event("a", finish="abort"),
    "the usage": b'data: {"id":"cmpl-1","object":"o","choices":[],"usage":{"prompt_tokens":1}}\n\n',
    "an error": b'data: {"error": {"message": "no", "code": 400}}\n\n',
    "the end mark": b"data: [DONE]\n\n",
    "a comment": b": still there\n\n",
    "thoughts that were kept back": event("x").replace(b'"text":"x"', b'"delta":{}'),
    "a usage in each event": event("a", usage={"prompt_tokens": 1}),
    "two ids too many": event("a", [100_000, 100_001]),
    "a logprob": event("a").replace(b'"logprobs":null', b'"logprobs":{"tokens":["["]}'),
    "two events in one": event("a", finish="stop") + event("b"),
    "an error before another": b'data: {"error": {"message": "no"}}\n\n' + event("b"),
    "no event's end": event("a")[:-1],
    "a handle before the text": event("a").replace(
        b'"choices"', b'"kv_transfer_params":{"remote_host":"p1"},"choices"'
    ),
    "a handle behind the text": event("a", kv_transfer_params={"remote_host": "p1"}),
    "a line that only clients see": event("a").replace(b'"text":"a"', b'"text":"a\rb"'),
}


@pytest.mark.parametrize("strange", STRANGE.values(), ids=STRANGE)
@given(st.integers(0, 3), st.booleans())
def test_what_is_not_plain_is_left_and_what_follows_it(
    strange: bytes, before: int, alone: bool
) -> None:
    path, got = taught(event("x"))
    front = b"".join([chunk(event(f"{n}")) for n in range(before)])
    read = front + chunk(strange) + (b"" if alone else chunk(event("y")))
    assert path.forward(read) == len(front)
    assert payloads(got) == [event(f"{n}", None) for n in range(before)]


@pytest.mark.parametrize(
    "read",
    [
        chunk(event("a"))[:-1],
        chunk(event("a"))[1:],
        b"0" + chunk(event("a")),
        chunk(event("a")).replace(b"\r\n", b";x=y\r\n", 1),
        chunk(event("a")).upper(),
        b"%x\r\n" % (len(event("a")) - 1) + event("a") + b"\r\n",
        b"",
        b"\r\n",
    ],
)
def test_what_is_no_whole_chunk_is_left(read: bytes) -> None:
    path, got = taught(event("x"))
    assert path.forward(read) == 0
    assert not got


def test_a_chunk_that_is_too_long_is_left() -> None:
    path, _ = taught(event("x"))
    assert path.forward(chunk(event("a" * MAX_CHUNK))) == 0


def test_nothing_is_taken_of_a_stream_that_does_not_flow() -> None:
    path, got = taught(event("x"))
    path.enabled = False
    assert path.forward(chunk(event("a"))) == 0
    assert not got


def test_a_stream_that_changes_its_form_is_learned_anew() -> None:
    path, got = taught(event("x", form="reasoning"))
    sent = [chunk(event(f"{n}", form="content")) for n in range(40)]
    taken = [path.forward(read) for read in sent]
    if taken[-1] == 0:
        path.count(8, 1.0)  # the relay has passed some on meanwhile
        taken += [path.forward(read) for read in sent[:2]]
    assert taken[-1] > 0
    assert got


def test_counts_are_those_of_the_events() -> None:
    path, _ = taught(event("x"))
    events, gaps = path.events, sum(path.buckets)
    path.forward(chunk(event("a")))
    path.forward(chunk(event("b")) + chunk(event("c")))
    assert path.events - events == 3
    assert sum(path.buckets) - gaps == 3
    assert path.total > 0


@given(st.lists(st.integers(0, 2**34), max_size=100))
def test_ids_are_kept_in_order(ids: list[int]) -> None:
    path, _ = taught(event("x"))
    before = len(path.ids)
    for one in ids:
        path.forward(chunk(event("a", [one])))
    assert list(path.ids)[before:] == [one for one in ids if one < 10**9]


@pytest.mark.parametrize("together", [False, True])
def test_events_without_an_id_or_with_several_cost_none_of_the_others(together: bool) -> None:
    path, got = taught(event("x"))
    before = len(path.ids)
    lists = [[1], [], [2, 3], [4]] * 20
    reads = [chunk(event("a", [7]).replace(b"[7]", json.dumps(ids).encode())) for ids in lists]
    for read in [b"".join(reads)] if together else reads:
        assert path.forward(read) == len(read)
    assert payloads(got) == [event("a", None)] * len(lists)
    assert list(path.ids)[before:] == [1, 2, 3, 4] * 20


def test_what_is_no_id_costs_none_of_the_others() -> None:
    path, _ = taught(event("x"))
    before = len(path.ids)
    for ids in (b"[1]", b"[null]", b"[2]"):
        path.forward(chunk(event("a").replace(b"[7]", ids)))
    assert list(path.ids)[before:] == [1, 2]


@pytest.mark.parametrize(
    "unlike",
    [
        *STRANGE.values(),
        event("a", choices=[]),
        event("a").replace(
            b'"choices":[', b'"choices":[{"index":1,"text":"b","finish_reason":null},'
        ),
        event("a").replace(b'"token_ids":[7]', b'"token_ids":[7],"more":[1]'),
        event("a").replace(b'"finish_reason":null', b'"other":null'),
        event("a").replace(b'"id":"cmpl-1"', b'"id":1'),
        event("a").replace(b'"text":"a"', b'"text":["a"]'),
        event("a").replace(b"\n\n", b"\r\n\r\n"),
        event("a", form="content").replace(b'"content":"a"', b'"content":"a","tool_calls":[]'),
        event("a")[:-3] + b"\n\n",
    ],
)
def test_nothing_is_learned_of_what_is_not_plain(unlike: bytes) -> None:
    found = EventTemplates().learn(unlike, takes_ids=True)
    assert found is None or unlike == STRANGE["two ids too many"], "which is plain but for its ids"


def test_a_form_is_one_template() -> None:
    templates = EventTemplates()
    first = templates.learn(event("a", [1]), takes_ids=True)
    assert first is not None
    assert templates.learn(event("b", [2, 3]), takes_ids=True) is first
    assert templates.latest(takes_ids=True) is first
    assert templates.latest(takes_ids=False) is not first
    assert templates.learn(event("a", [1], style=SPACED), takes_ids=True) is not first


def test_a_new_stream_begins_with_the_form_that_was_learned_last() -> None:
    """Its first read takes the fast path. Streams of other processes' templates know nothing of
    it.
    """
    templates = EventTemplates()
    templates.learn(event("a", None), takes_ids=False)
    for known, expected in ((templates, len(chunk(event("b", None)))), (EventTemplates(), 0)):
        path = FastPath(lambda: 0.0, known, takes_ids=False)
        path.write_to(lambda _: None)
        path.enabled = True
        path._learn_at = 1
        assert path.forward(chunk(event("b", None))) == expected


def test_forms_are_few() -> None:
    """An engine that writes each event in another form fills no memory."""
    templates = EventTemplates()
    for number in range(100):
        assert templates.learn(event("a", None, more=number), takes_ids=False) is not None
    assert len(templates._known) <= 32


def test_ids_do_not_pile_up_unparsed() -> None:
    """However chunks come together, ids are made numbers soon: once a read with several had passed
    the mark, none ever were.
    """
    path, _ = taught(event("x"))
    one, two = chunk(event("a")), chunk(event("b", [8])) + chunk(event("c", [9]))
    for _ in range(20):
        for read in (*[one] * 31, two):
            assert path.forward(read) == len(read)
            assert len(path._unparsed) <= 32
    assert path.tokens >= 20 * 33


def test_ids_beyond_a_bound_are_counted_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that never ends takes no more memory for its ids than that."""
    monkeypatch.setattr(tokens, "MAX_KEPT", 100)
    path, _ = taught(event("x"))
    before = path.tokens
    for _ in range(10):
        path.keep_ids([b"7"] * 60)
    for _ in range(100):
        path.forward(chunk(event("a")))
    assert path.tokens == before + 700
    assert len(path.ids) <= 100


def test_one_attempt_to_learn_per_read() -> None:
    """A read whose events are all of other forms is not studied for each of them: what is behind
    the first is left to others.
    """
    path, _ = opened(takes_ids=False)
    read = b"".join(chunk(event("a", None, more=number)) * 9 for number in range(50))
    assert path.forward(read) == 9 * len(chunk(event("a", None, more=1)))


def test_sizes_of_chunks_that_are_kept() -> None:
    """A stream with events of all sizes leaves no table of all sizes behind."""
    template = EventTemplates().learn(event("a", None), takes_ids=False)
    assert template is not None
    for size in range(MAX_CHUNK):
        template.chunk_opening(size)
    assert len(template.openings) <= 512


@pytest.mark.parametrize("comment", [b"", b": still here\n\n"])
def test_the_last_event_is_kept_only_if_it_is_small(comment: bytes) -> None:
    """Each of a thousand streams may have sent one of megabytes. Behind it, no earlier event takes
    its place.
    """
    path, _ = opened()
    small, large = event("a"), event("a", logprobs="x" * MAX_SENT)
    path.written(small + comment)
    assert path.sent == small
    path.written(large + comment)
    assert path.sent == b""
    path.written(large + small + comment)
    assert path.sent == small
    path.written(event("a", logprobs="x" * (MAX_SENT - len(event("a", logprobs="")))))
    assert len(path.sent) == MAX_SENT


def test_how_many_ids_an_event_had_is_kept() -> None:
    """A parser that goes on with the stream needs that. Most events have one, and take no
    memory.
    """
    path, _ = taught(event("x"))
    lists = [(1,), (2, 3), (4,), (5,), (6, 7, 8), *[(9,)] * 60, (10, 11)]
    for ids in lists[:-1]:
        read = chunk(event("a", ids))
        assert path.forward(read) == len(read)
    path.written(event("b", lists[-1]) + event("c", (12,)) + event("d", ()) + event("e", (13, 14)))
    found = list(path.ids)[1:]
    assert found == [one for ids in lists for one in ids] + [12, 13, 14]
    pairs = list(zip(path.several[::2], path.several[1::2], strict=True))
    assert [found[at - 1 : at - 1 + count_] for at, count_ in pairs] == [
        [2, 3],
        [6, 7, 8],
        [10, 11],
        [13, 14],
    ]


def test_ids_of_calls_are_kept() -> None:
    """Those that can't be read make all unknown."""
    path, _ = opened()
    path.written(
        event("", (1,), form="content").replace(
            b'"content":""', b'"tool_calls":[{"id":"c","index":0}]'
        )
    )
    assert path.calls == ["c"]
    path.written(
        event("", (1,), form="content").replace(b'"content":""', b'"tool_calls":[{"id":7}]')
    )
    path.written(
        event("", (1,), form="content").replace(b'"content":""', b'"tool_calls":[{"id":"d"}]')
    )
    assert path.calls is None


async def test_what_is_noted_of_events_with_several_ids_is_bounded_as_the_ids_are() -> None:
    found = FastPath(lambda: 0.0, EventTemplates(), takes_ids=True)
    found.keep_ids([b",".join([b"1"] * tokens.MAX_KEPT)])
    noted = len(found.several)
    for _ in range(9):
        found.keep_ids([b"1,2", b"3,4"])
    assert len(found.several) == noted == 2
    assert found.tokens == tokens.MAX_KEPT + 36


@pytest.mark.parametrize("end", [b"\r", b"\n"])
@pytest.mark.parametrize("takes_ids", [True, False])
def test_a_line_end_within_a_chunk_of_a_known_size_is_left(takes_ids: bool, end: bytes) -> None:
    """Clients would read another event, or another field, than the engine has sent."""
    ids = (7,) if takes_ids else None
    path, got = taught(event("x", ids), takes_ids=takes_ids)
    plain = chunk(event("abc", ids))
    assert [path.forward(plain), path.forward(plain)] == [len(plain)] * 2
    del got[:]
    assert path.forward(plain.replace(b"abc", b"a" + end + b"c")) == 0
    assert not got
