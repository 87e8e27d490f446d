"""What real engines and their clients were recorded to say: where mutations begin."""

from __future__ import annotations

import re

from tests.sim.recordings.reading import Exchange, names, raw, read


def recorded_streams() -> dict[str, bytes]:
    """The bodies of recorded streams by name."""
    found = {
        name: one.answer.body
        for name, one in _exchanges().items()
        if one.answer and one.answer.streamed
    }
    for name in ("fail_D_sigkill_midstream", "fail_D_sigterm_midstream"):
        found[name] = b"".join(re.findall(rb"data: [^\n]*\n\n", raw(name)))
    return found


def recorded_answers() -> dict[str, bytes]:
    """Recorded answers as they were on the wire; chunked ones are framed anew, an event a chunk."""
    found = {}
    for name, one in _exchanges().items():
        answer = one.answer
        if answer is None or answer.line is None or answer.headers is None:
            continue
        head = "\r\n".join(
            [answer.line, *(f"{key}: {value}" for key, value in answer.headers.items()), "", ""]
        ).encode()
        if "content-length" in answer.headers:
            found[name] = head + answer.body
        else:
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in answer.events)
            found[name] = head + chunks + b"0\r\n\r\n"
    return found


def recorded_requests() -> dict[str, bytes]:
    """Recorded requests to the generating routes as they were on the wire."""
    return {name: one.sent.raw for name, one in _exchanges().items() if one.sent.method == "POST"}


def recorded_bodies() -> dict[str, bytes]:
    """The bodies of those requests."""
    return {name: one.sent.body for name, one in _exchanges().items() if one.sent.method == "POST"}


def _exchanges() -> dict[str, Exchange]:
    found = {}
    for name in names():
        if name.startswith(("agg_", "err_", "misc_", "pd", "fail_D_400")):
            found[name] = read(name)
    return found
