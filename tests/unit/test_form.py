"""Forms are cut as the parser of engines cuts them, or refused; in bounded steps, without a copy of
a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from pdproxy.kit.errors import BadRequestError
from pdproxy.serving.dispatch.fingerprint import keyed
from pdproxy.wire.body_bounds import Body
from pdproxy.wire.form import (
    MAX_HEAD,
    MAX_LINES,
    MAX_PARTS,
    SLICE,
    Form,
    FormError,
    boundary_in,
    form_in,
    with_changes,
)
from pdproxy.wire.speech_body import MAX_TEXT, speech_body, speech_usage
from tests.fakes.forms import BOUNDARY, form, typed

PARTS = {"model": b"tiny", "prompt": "é\r\n--".encode()}
LINE = b'Content-Disposition: form-data; name="a"'


def cut(body: Body, boundary: str = BOUNDARY) -> tuple[Form, int]:
    """The form, and the number of steps."""
    steps, count = form_in(body, boundary.encode()), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Form = end.value
            return found, count
        count += 1


def read(body: Body, boundary: str = BOUNDARY) -> list[tuple[str, bytes, bool]]:
    """Names and contents, and which are files."""
    return [
        (part.name, bytes(body[part.begin : part.end]), part.is_file)
        for part in cut(body, boundary)[0].parts
    ]


def theirs(body: bytes, content_type: str) -> list[tuple[str, bytes, bool]]:
    """The same as engines read it: Starlette with python-multipart."""

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body

    async def parsed() -> list[tuple[str, bytes, bool]]:
        parser = MultiPartParser(Headers({"content-type": content_type}), stream())
        return [
            (name, await value.read(), True)
            if isinstance(value, UploadFile)
            else (name, value.encode(), False)
            for name, value in (await parser.parse()).multi_items()
        ]

    return asyncio.run(parsed())


# -- what is read


@pytest.mark.parametrize(
    "head",
    [
        'Content-Disposition: form-data; name="file"; filename="a b;c.wav"',
        "content-disposition:form-data;name=file;filename=a.wav;filename*=utf-8''a.wav",
        'Content-Disposition: form-data; filename="C:\\x\\a.wav"; name="file"',
        'Content-Type: audio/wav\r\nContent-Disposition: FORM-DATA; name="file"; filename=""',
        'Content-Disposition: form-data; name="file"; filename="é"\r\ncontent-length: 3',
        "content-transfer-encoding:8bit\r\nContent-Disposition: form-data; name=file; filename=x",
    ],
)
def test_the_heads_of_usual_clients(head: str) -> None:
    """curl, Python, Java, .NET, browsers: as engines read them."""
    body = f"--{BOUNDARY}\r\n{head}\r\n\r\nabc\r\n--{BOUNDARY}--".encode()
    assert read(body) == [("file", b"abc", True)] == theirs(body, typed()[1])


@pytest.mark.parametrize(
    "value",
    [
        "multipart/form-data; boundary=abc",
        'Multipart/Form-Data;boundary="abc"',
        'multipart/form-data; charset=utf-8; boundary="abc"',
        "multipart/form-data ; BOUNDARY=abc ; charset=UTF-8",
    ],
)
def test_boundaries(value: str) -> None:
    assert boundary_in(value) == b"abc"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=a; boundary=b",
        "multipart/form-data; boundary=a; boundary*=b",
        "multipart/form-data; boundary*0=a",
        "multipart/form-data; boundary=a\\b",
        'multipart/form-data; boundary="a b"',
        'multipart/form-data; boundary="a',
        "multipart/form-data; boundary=a; charset=utf-16",
        "multipart/form-data; boundary=é",
        f"multipart/form-data; boundary={'a' * 71}",
        f"multipart/form-data; boundary=a{'; charset=utf-8' * 99}",
        "multipart/mixed; boundary=a",
        "application/x-www-form-urlencoded",
    ],
)
def test_content_types_that_are_refused(value: str) -> None:
    with pytest.raises(FormError):
        boundary_in(value)


def _with_head(head: bytes) -> bytes:
    return b"--x\r\n" + head + b"\r\n\r\nv\r\n--x--\r\n"


GOOD = _with_head(LINE)
REFUSED = {
    "nothing": b"",
    "no boundary": b"abc",
    "another boundary": GOOD.replace(b"x", b"y"),
    "a longer boundary": GOOD.replace(b"--x", b"--xy"),
    "text before it": b"\r\n" + GOOD,
    "text behind it": GOOD + b"a",
    "an end without a line": GOOD + b"\r\n",
    "no end": GOOD.removesuffix(b"--\r\n"),
    "half an end": GOOD.removesuffix(b"-\r\n"),
    "a file without an end": GOOD.removesuffix(b"\r\n--x--\r\n") + b"a" * 3 * SLICE,
    "lines of Unix": GOOD.replace(b"\r\n", b"\n"),
    "a boundary in a line": GOOD.replace(b"v", b"a--x"),
    "a boundary with more behind it": GOOD.replace(b"v", b"\r\n--xy"),
    "a boundary with blanks": GOOD.replace(b"--x\r\n", b"--x \r\n"),
    "a boundary behind a line of Unix": GOOD.replace(b"v", b"\n--x\r\n" + LINE + b"\r\n\r\nw"),
    "a boundary in a head": _with_head(LINE + b'; filename="--x"'),
    "no content": b"--x\r\n" + LINE + b"\r\n\r\n--x--\r\n",
    "no head": b"--x\r\n\r\nv\r\n--x--\r\n",
    "an empty head": b"--x\r\n\r\n\r\nv\r\n--x--\r\n",
    "an endless head": b"--x\r\n" + LINE + b"\r\na: " + b"b" * (8 << 20) + b"\r\n\r\nv\r\n--x--",
    "a head without an end": b"--x\r\n" + LINE + b"\r\nv\r\n--x--",
    "many lines in a head": _with_head(LINE + b"\r\na: b" * MAX_LINES),
    "a line that is no header": _with_head(LINE + b"\r\nabc"),
    "a folded line": _with_head(b"Content-Disposition: form-data;\r\n name=a"),
    "a blank before the colon": _with_head(LINE.replace(b":", b" :")),
    "no name": _with_head(b"Content-Disposition: form-data"),
    "an empty name": _with_head(LINE.replace(b'"a"', b'""')),
    "two names": _with_head(LINE + b"; name=b"),
    "two names of files": _with_head(LINE + b"; filename=b; filename=c"),
    "an extended name": _with_head(LINE + b"; name*=utf-8''model"),
    "a numbered name": _with_head(LINE + b"; name*0=model"),
    "an extended file name alone": _with_head(LINE + b"; filename*=utf-8''b"),
    "an escaped quote": _with_head(LINE + rb'; filename="\"; name=\"model"'),
    "an escape before a quote": _with_head(LINE + rb'; filename="a\\"; name="model"'),
    "a quote without an end": _with_head(LINE + b'; filename="a'),
    "an escaped name": _with_head(LINE.replace(b'"a"', b'"%6dodel"')),
    "another parameter": _with_head(LINE + b"; size=5"),
    "an attachment": _with_head(LINE.replace(b"form-data", b"attachment")),
    "two Content-Dispositions": _with_head(LINE + b"\r\n" + LINE.replace(b'"a"', b'"b"')),
    "base64": _with_head(LINE + b"\r\nContent-Transfer-Encoding: base64"),
    "a zero byte": _with_head(LINE.replace(b"a", b"a\0")),
    "a lone carriage return": _with_head(LINE + b"\ra: b"),
    "thousands of parts": form(*[("a[]", b"")] * 5000, boundary="x"),
    "one part too many": form(*[("a[]", b"")] * (MAX_PARTS + 1), boundary="x"),
}


@pytest.mark.parametrize("body", REFUSED.values(), ids=REFUSED)
def test_forms_that_servers_may_read_differently_are_refused(body: bytes) -> None:
    assert read(GOOD, "x") == [("a", b"v", False)]
    with pytest.raises(FormError):
        cut(body, "x")


def test_as_many_parts_as_are_allowed() -> None:
    assert len(read(form(*[("a[]", b"")] * MAX_PARTS))) == MAX_PARTS


_PIECES = st.sampled_from(
    [
        *(b"--x", b"\r\n", b"\n", b"\r", b"--", b"x", b"-", b" ", b";", b'"', b"\\", b"=", b":"),
        *(b"name", b"filename", b"filename*=", b"; ", b"model", b"\r\n--x\r\n", b"\r\n\r\n"),
        *(
            LINE,
            b"Content-Disposition: form-data",
            b"--x--\r\n",
            b"\0",
            b"content-type: a",
        ),
    ]
)


@given(st.lists(_PIECES, max_size=6), st.integers(0, 200), st.integers(0, 40), st.booleans())
def test_engines_read_the_same_parts(pieces: list[bytes], at: int, width: int, two: bool) -> None:
    """Of any form that is not refused, however it was changed."""
    good = form(("model", b"tiny"), ("file", b"RIFF\r\n", "a.wav"), ("n", b"1"), boundary="x")
    body = good[:at] + b"".join(pieces) + good[at + width :]
    if two:
        body = body.replace(b"tiny", b"".join(pieces), 1)
    try:
        ours = read(body, "x")
    except FormError:
        return
    try:
        found = theirs(body, typed("x")[1])
    except MultiPartException:
        return  # an engine refuses it
    assert found == ours


def test_a_large_file_is_searched_in_slices() -> None:
    """Also one that is made so that a search takes long. A boundary may stand on their edge."""
    for size in (SLICE - 1, SLICE, SLICE + 1, 5 * SLICE):
        for fill in (b"a", b"\r\n--" + BOUNDARY[:-1].encode()):
            file = (fill * (size // len(fill) + 1))[:size]
            found, steps = cut(form(("file", file, "a")))
            (part,) = found.parts
            assert part.end - part.begin == size
            assert abs(steps - size // SLICE) <= 1


def test_each_step_searches_one_slice() -> None:
    """A body says when it is searched: no search is longer."""

    class Watched(bytearray):
        longest = 0

        def find(self, sub, start=0, end=None):
            Watched.longest = max(Watched.longest, (len(self) if end is None else end) - start)
            return super().find(sub, start, end)

    cut(Watched(form(("file", b"a" * 9 * SLICE, "a"))))
    assert max(SLICE, MAX_HEAD) <= Watched.longest < SLICE + 100


# -- what is changed


def test_only_what_is_changed_is_written() -> None:
    body = form(("a", b"1"), ("file", b"\0\xff\r\n", "x.wav"), ("b", b"2"), ("c", b""))
    found, _ = cut(body)
    assert with_changes(body, found, {}) is body
    changed = with_changes(body, found, {"b": b"two", "d": b"new"}, {"a"})
    assert changed == form(
        ("file", b"\0\xff\r\n", "x.wav"), ("b", b"two"), ("c", b""), ("d", b"new")
    )
    assert with_changes(form(), cut(form())[0], {"a": b"1"}) == form(("a", b"1"))
    with pytest.raises(FormError):
        with_changes(body, found, {"b": f"--{BOUNDARY}".encode()})


def test_all_changes_of_neighbours() -> None:
    names = ["a", "b", "c"]
    body = form(*[(name, b"1") for name in names])
    found, _ = cut(body)
    for first, second in pairwise(names):
        left = [(one, b"1") for one in names if one not in (first, second)]
        assert read(with_changes(body, found, {}, {first, second})) == [
            (one, value, False) for one, value in left
        ]
        both = with_changes(body, found, {first: b"", second: b"x" * 99})
        assert {name: value for name, value, _ in read(both)}[second] == b"x" * 99


# -- what is read of speech


def spoken(*fields: tuple[str, bytes] | tuple[str, bytes, str]) -> bytes:
    return form(("file", b"RIFF", "a.wav"), *fields)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (spoken(("model", b"a"), ("model", b"b")), "`model` comes twice"),
        (spoken(("stream", b"true"), ("stream", b"false")), "`stream` comes twice"),
        (spoken(("file", b"RIFF", "b.wav")), "`file` comes twice"),
        (spoken(("model", b"a", "a")), "`model` is a file"),
        (spoken(("model", b"\xff")), "no text"),
        (spoken(("prompt", b"a" * (MAX_TEXT + 1))), "more than"),
        (spoken(*[("a[]", b"a" * (MAX_TEXT // 99))] * 100), "more than"),
        (spoken(("vllm_xargs", b'{"a":NaN}')), "valid JSON"),
        (spoken(("vllm_xargs", b"[" * 50_000)), "valid JSON"),
        (spoken(("vllm_xargs", b'{"a":"' + b"a" * 100_000 + b'"}')), "vllm_xargs"),
    ],
)
def test_fields_that_are_refused(body: bytes, said: str) -> None:
    with pytest.raises(BadRequestError, match=said):
        speech_body(body, cut(body)[0])


def test_the_boundary_stands_in_no_new_name() -> None:
    """A client knows the names of models, and chooses its boundary."""
    body = form(("model", b"alias"), boundary="large")
    with pytest.raises(FormError):
        speech_body(body, cut(body, "large")[0], lambda model, fields: "whisper--large")


def test_handles_are_removed() -> None:
    """Of the arguments that engines give to their connectors; and the field of a handle itself."""
    arguments = b'{"kv_transfer_params":"x", "a":[1,"b"], "ec_transfer_params":1}'
    body = spoken(("vllm_xargs", arguments), ("kv_transfer_params", b"{}"), ("n", b"1"))
    made = speech_body(body, cut(body)[0])
    assert made.data == spoken(("vllm_xargs", b'{"a":[1,"b"]}'), ("n", b"1"))


@pytest.mark.parametrize(
    ("text", "stream"), [(b"true", True), (b"1", True), (b"Yes", True), (b"0", False), (b"", False)]
)
def test_streams(text: bytes, stream: bool) -> None:
    body = spoken(("stream", text))
    assert speech_body(body, cut(body)[0]).stream is stream


def test_work_is_that_of_the_audio() -> None:
    """A second of 64 kbit/s counts as 100 tokens."""
    body = form(("file", b"a" * 80_000, "a.mp3"), ("prompt", b"b" * 40))
    made = speech_body(body, cut(body)[0])
    assert made.size == 10 * 100 * 4 + 40
    assert made.data is body
    assert made.parts is not None
    assert made.parts["prompt"] == msgspec.Raw(b'"' + b"b" * 40 + b'"')


def test_a_form_that_is_sent_again_is_known() -> None:
    """A client chooses another boundary each time: its content may have ended an engine."""
    make = keyed(b"a key")
    known = []
    for boundary, file in (("a" * 20, b"RIFF"), ("b" * 20, b"RIFF"), ("b" * 20, b"FFIR")):
        body = form(("file", file, "a.wav"), ("model", b"tiny"), boundary=boundary)
        parts = speech_body(body, cut(body, boundary)[0]).parts
        assert parts is not None
        known.append(make("/v1/audio/transcriptions", parts))
    assert known[0] == known[1] != known[2]


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        (b'{"text":"abcde","usage":{"type":"duration","seconds":3}}', (300, 2)),
        (b'{"duration":2.5,"language":"en","text":"abcd","segments":[]}', (250, 1)),
        (b'{"text":"abcd"}', (7, 1)),
        (b'{"text":""}', (7, 0)),
        (b'{"text":"a","usage":{"seconds":-1}}', None),
        (b'{"text":"a","usage":{"seconds":1e99}}', None),
        (b"WEBVTT", None),
    ],
)
def test_what_an_answer_has_used(answer: bytes, counts: tuple[int, int] | None) -> None:
    found = speech_usage(answer, 7)
    assert (None if found is None else (found.prompt_tokens, found.completion_tokens)) == counts
