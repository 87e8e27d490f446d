"""Bodies of the type multipart/form-data (RFC 7578): where their parts are.

Owns the strictness. Servers read a form that breaks the rules in different ways: text before the
first boundary, a boundary in the middle of a line, a name that is given twice. So a form goes on
only if all of them read the same parts. No part is decoded or copied here, and a large body is
searched in slices, between which others may run.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire.body_bounds import Body

MEDIA_TYPE = "multipart/form-data"
SLICE = 128 * 1024
"""Bytes that are searched at once: 0.1 ms, 1.5 ms of a body that is made for a slow search."""
MAX_PARTS = 128
"""Parts of a form. vLLM's longest has 30 fields; only lists come more than once."""
MAX_HEAD = 4096
"""Bytes of a part's head: python-multipart, which engines read forms with, takes no longer line."""
MAX_LINES = 8
"""Lines of a part's head. python-multipart takes no more."""
MAX_CONTENT_TYPE = 512
"""Characters of the header with the boundary, whose longest value has 70."""

_WORD = r"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_QUOTED = r'"(?:[^"\\\x00-\x1f\x7f]|\\(?!"))*+"'
"""Without an escaped quote: some servers end the text there. A lone backslash may be of a path."""
_PARAMETER = rf"[ \t]*+;[ \t]*+([A-Za-z*]++)=({_QUOTED}|{_WORD})"
_DISPOSITION = re.compile(rf"form-data((?:{_PARAMETER})*+)[ \t]*+".encode(), re.IGNORECASE)
_PARAMETERS = re.compile(_PARAMETER.encode())
_LINE = re.compile(rf"({_WORD}):[ \t]*+([^\x00-\x08\x0a-\x1f\x7f]*+)".encode())
_NAME = re.compile(rb"[A-Za-z0-9_.\[\]-]{1,128}")
_UNCHANGED = frozenset({b"7bit", b"8bit", b"binary"})
_BOUNDARY = re.compile(r"[0-9A-Za-z'()+_,./:=?-]{1,70}")
_TYPE_PARAMETER = re.compile(r"[ \t]*+;[ \t]*+([A-Za-z]++)=(\"[^\"\\]*+\"|[^\s\",;\\]++)[ \t]*+")


class FormError(BadRequestError):
    """A body that is no form, or one that not all servers read in the same way."""

    def __init__(self, why: str) -> None:
        super().__init__(f"The body is no {MEDIA_TYPE} that can be passed on: {why}", param="body")


class Part(NamedTuple):
    """A part: its name, whether it is a file, and its places in the body: of the delimiter before
    it, and of its content.
    """

    name: str
    is_file: bool
    delimiter: int
    begin: int
    end: int


class Form(NamedTuple):
    """The parts of a body, and the place of the delimiter behind the last one."""

    boundary: bytes
    parts: list[Part]
    closing: int

    @property
    def content_type(self) -> bytes:
        """The header that says how the body is read."""
        return b'%b; boundary="%b"' % (MEDIA_TYPE.encode(), self.boundary)


def boundary_in(content_type: str) -> bytes:
    """Return the boundary that a header names. Raises FormError: none, or one that servers may read
    in different ways.
    """
    kind, _, rest = content_type.partition(";")
    if kind.strip(" \t").lower() != MEDIA_TYPE:
        raise FormError(f"its content type must be {MEDIA_TYPE}")
    found: list[str] = []
    at, rest = 0, f";{rest}"
    while at < len(rest) <= MAX_CONTENT_TYPE:
        if (one := _TYPE_PARAMETER.match(rest, at)) is None:
            break
        name, value = one[1].lower(), one[2].strip('"')
        if name == "boundary":
            found.append(value)
        elif name != "charset" or value.lower() not in ("utf-8", "utf8"):
            break
        at = one.end()
    if at < len(rest) or len(found) != 1 or not _BOUNDARY.fullmatch(found[0]):
        raise FormError("its content type must name one boundary, of up to 70 usual characters")
    return found[0].encode()


def form_in(body: Body, boundary: bytes) -> Generator[None, None, Form]:
    """Find the parts of a body, at most `SLICE` bytes of it in a step. The generator returns them.

    Raises:
        FormError: not all servers would read the same parts, or there are too many.
    """
    mark = b"--" + boundary
    parts: list[Part] = []
    at = 0
    if not body.startswith(mark):
        raise FormError("it does not begin with the boundary")
    while True:
        after = at + len(mark)
        if body.startswith(b"--", after):
            if body[after + 2 : after + 5] not in (b"", b"\r\n"):
                raise FormError("something follows its end")
            return Form(boundary, parts, at)
        if not body.startswith(b"\r\n", after):
            raise FormError("a boundary stands in the middle of a line")
        if len(parts) == MAX_PARTS:
            raise FormError(f"it has more than {MAX_PARTS} parts")
        head_end = body.find(b"\r\n\r\n", after, after + MAX_HEAD)
        if head_end < 0:
            raise FormError(f"the head of a part has no end within {MAX_HEAD} bytes")
        name, is_file = _head(bytes(body[after + 2 : head_end]))
        begin = head_end + 4
        found = yield from _found(body, mark, after)
        if found < 0:
            raise FormError("it has no end")
        if found < begin + 2 or not body.startswith(b"\r\n", found - 2):
            raise FormError("a boundary stands in the middle of a line")
        parts.append(Part(name, is_file, at, begin, found - 2))
        at = found


def _found(body: Body, mark: bytes, start: int) -> Generator[None, None, int]:
    """Return the next place of a delimiter, -1 if there is none."""
    while True:
        found = body.find(mark, start, start + SLICE + len(mark) - 1)
        if found >= 0:
            return found
        start += SLICE
        if start >= len(body):
            return -1
        yield


def _head(head: bytes) -> tuple[str, bool]:
    """Return the name of a part, and whether it is a file."""
    lines = head.split(b"\r\n")
    if len(lines) > MAX_LINES:
        raise FormError(f"the head of a part has more than {MAX_LINES} lines")
    said: bytes | None = None
    for line in lines:
        if (found := _LINE.fullmatch(line)) is None:
            raise FormError("the head of a part has a line that is no header")
        header, value = found[1].lower(), found[2].rstrip(b" \t")
        if header == b"content-disposition":
            if said is not None:
                raise FormError("a part has two Content-Dispositions")
            said = value
        elif header == b"content-transfer-encoding" and value.lower() not in _UNCHANGED:
            raise FormError("a part has a Content-Transfer-Encoding, which engines do not read")
    if said is None or (whole := _DISPOSITION.fullmatch(said)) is None:
        raise FormError('each part needs `Content-Disposition: form-data; name="..."`')
    found_ones = _PARAMETERS.findall(whole[1])
    values = dict(found_ones)
    if len(values) < len(found_ones) or values.keys() - {b"name", b"filename", b"filename*"}:
        raise FormError("a part's Content-Disposition may have one name and one filename")
    if b"filename*" in values and b"filename" not in values:
        raise FormError("a part has `filename*` without `filename`")  # not all take it for a file
    name = values.get(b"name", b"").strip(b'"')
    if not _NAME.fullmatch(name):
        raise FormError("a part needs a name of up to 128 letters, digits, and . _ - [ ]")
    return name.decode(), b"filename" in values


def with_changes(
    body: Body, form: Form, values: Mapping[str, bytes], dropped: AbstractSet[str] = frozenset()
) -> Body:
    """Return a form with other values, and without some parts. Values of new names become its last
    parts. Without changes it is the same object.

    Raises:
        FormError: a value has the boundary in it.
    """
    mark = b"--" + form.boundary
    if any(mark in value for value in values.values()):
        raise FormError("its boundary stands in the value of a field")
    named = {part.name for part in form.parts}
    new = b"".join(
        b'%b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
        % (mark, name.encode(), value)
        for name, value in values.items()
        if name not in named
    )
    view, pieces, at = memoryview(body), list[bytes | memoryview](), 0
    for part in form.parts:
        if part.name in dropped:
            pieces.append(view[at : part.delimiter])
            at = part.end + 2
        elif part.name in values:
            pieces += [view[at : part.begin], values[part.name]]
            at = part.end
    if not pieces and not new:
        return body
    return b"".join([*pieces, view[at : form.closing], new, view[form.closing :]])
