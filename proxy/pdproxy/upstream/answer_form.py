"""Whole answers that came in one read, recognized by the form of an earlier answer, without the
parser.

An engine sends the same head with each answer, but for three values: date, length and request id.
The parser calls back for each header, so a head costs more than its answer. Whatever differs from
the form in anything else is left to the parser.
"""

from __future__ import annotations

import re

_BEGIN = b"HTTP/1.1 200 OK\r\n"
_END = b"\r\n\r\n"
_VARIES = {
    b"date": rb"([!-~](?:[ -~]{0,62}[!-~])?)",
    b"content-length": rb"(\d{1,9})",
    b"x-request-id": rb"([!-~]{1,256})",
}
"""What the values may be that differ from answer to answer: no form has a white space at an end, or
a control character.
"""
_FIXED = re.compile(rb"[!-~](?:[ -~]*[!-~])?")
_NAME = re.compile(rb"[A-Za-z0-9-]{1,64}")
_NOT_LEARNED = frozenset({b"transfer-encoding", b"connection", b"upgrade", b"trailer"})
"""Names that say how an answer is framed, or that the connection ends: such heads are the
parser's.
"""
MAX_FORM = 2048
"""Bytes of a head that is learned."""


class AnswerForm:
    """The form of the last whole answer that the parser has read. One for all connections to an
    engine.
    """

    __slots__ = ("_headers", "_last", "_length", "_matches", "_varying")

    def __init__(self) -> None:
        self._matches: re.Pattern[bytes] | None = None
        self._last = b""
        """The pattern of the last head that had another form."""
        self._headers: list[tuple[bytes, bytes]] = []
        self._varying: list[int] = []
        """The places of the values that differ, in the order of the pattern's groups."""
        self._length = 0
        """Which of these is the length."""

    def __repr__(self) -> str:
        return f"<AnswerForm {b', '.join(name for name, _ in self._headers).decode()}>"

    def whole(self, data: bytes) -> tuple[list[tuple[bytes, bytes]], bytes] | None:
        """Return headers (names in lower case) and body of a read that is one whole answer of this
        form; None: unknown.
        """
        pattern = self._matches
        found = None if pattern is None else pattern.match(data)
        if found is None:
            return None
        values, end = found.groups(), found.end()
        if len(data) - end != int(values[self._length]):
            return None
        headers = self._headers.copy()
        for at, value in zip(self._varying, values):  # noqa: B905  # the pattern was made of them
            headers[at] = headers[at][0], value
        return headers, data[end:]

    def learn(self, data: bytes) -> None:
        """Take the form of a read that was one whole answer with status 200, which keeps its
        connection.
        """
        end = data.find(_END, 0, MAX_FORM)
        if end < 0 or not data.startswith(_BEGIN):
            return
        pattern = re.escape(_BEGIN)
        headers: list[tuple[bytes, bytes]] = []
        varying: list[int] = []
        for line in data[len(_BEGIN) : end].split(b"\r\n"):
            name, _, value = line.partition(b": ")
            lower = name.lower()
            if lower in _NOT_LEARNED or not _NAME.fullmatch(name) or not _FIXED.fullmatch(value):
                return
            varies = _VARIES.get(lower)
            if varies is not None:
                varying.append(len(headers))
            pattern += re.escape(name) + b": " + (varies or re.escape(value)) + b"\r\n"
            headers.append((lower, value))
        names = [name for name, _ in headers]
        if len(set(names)) < len(names) or b"content-length" not in names:
            return
        if self._matches is not None and pattern != self._last:
            # To compile a form takes as long as to serve a request: where a header differs in each
            # answer, no form comes twice in a row.
            self._last = pattern
            return
        self._matches, self._last = re.compile(pattern + b"\r\n"), b""
        self._headers, self._varying = headers, varying
        self._length = varying.index(names.index(b"content-length"))
