"""Whether two answers are the same to the byte, but for what no two answers share: ids, times,
fingerprints.
"""

from __future__ import annotations

import dataclasses
import re

from tests.fakes.client import Answer

_SUBSTITUTED = (
    (
        re.compile(
            rb'"((?:item_|call_)?id)":"(cmpl-|chatcmpl-tool-|chatcmpl-|resp_|msg_|rs_|fc_|call_)[^"]*"'
        ),
        rb'"\1":"\2*"',
    ),
    (re.compile(rb'"(created|created_at)":\d+'), rb'"\1":0'),
    (re.compile(rb'"signature":"[0-9a-f]+"'), rb'"signature":"*"'),
    (re.compile(rb'"system_fingerprint":"[^"]*"'), rb'"system_fingerprint":"*"'),
)
_CACHED = re.compile(rb'"(cached|created_cache)_tokens":\d+')
_INDEX = re.compile(rb'"choices":\[\{"index":(\d+)')


def difference(plain: Answer, other: Answer, *, cached: bool = True) -> str:
    """Return the first difference, "" where there is none. `cached`: whether they must have found
    as much cached.
    """
    if not cached:
        plain, other = (
            dataclasses.replace(one, body=_CACHED.sub(b"", one.body)) for one in (plain, other)
        )
    honest = honest_status(plain)
    if honest is not None:
        plain = honest
    if plain.status != other.status:
        return (
            f"status {plain.status} != {other.status}: {plain.body[:300]!r} != {other.body[:300]!r}"
        )
    for name in ("content-type", "www-authenticate", "allow", "location"):
        if plain.header(name) != other.header(name):
            return f"{name}: {plain.header(name)!r} != {other.header(name)!r}"
    if not (plain.ended and other.ended):
        return f"whole: {plain.ended} != {other.ended}"
    if not plain.body.startswith(b"data:"):
        return _first(masked(plain.body), masked(other.body))
    if (mixed := mixed_up(other)) and not mixed_up(plain):
        return mixed
    one, two = _by_choice(plain), _by_choice(other)
    if one.keys() != two.keys():
        return f"choices {sorted(one)} != {sorted(two)}"
    for key in one:
        if why := _first(b"".join(one[key]), b"".join(two[key])):
            return f"choice {key!r}: {why}"
    return ""


def honest_status(plain: Answer) -> Answer | None:
    """Return the answer as it would be with the status that it speaks of: an engine says 200 to a
    stream and then refuses.
    """
    if plain.status != 200 or not plain.body.startswith(b'data: {"error"'):
        return None
    payload, mark = plain.events[0].removeprefix(b"data: ").strip(), plain.events[1:]
    assert mark == [b"data: [DONE]\n\n"]
    code = int(re.findall(rb'"code": ?(\d+)', payload)[-1])
    return Answer(code, [("content-type", "application/json")], payload, [], True)


def masked(body: bytes) -> bytes:
    """Return a body without what is minted."""
    for pattern, instead in _SUBSTITUTED:
        body = pattern.sub(instead, body)
    return body


def mixed_up(answer: Answer) -> str:
    """Return what says that a stream was put together from several: two ids, or two times."""
    for name in (rb'"id":"((?:cmpl|chatcmpl)-[^"]*)"', rb'"created":(\d+)'):
        found = {
            match
            for match in re.findall(name, answer.body)
            if not match.startswith(b"chatcmpl-tool")
        }
        if len(found) > 1:
            return f"one stream, several: {found}"
    return ""


def _by_choice(answer: Answer) -> dict[bytes, list[bytes]]:
    """Return the events of each choice in their order: choices may overtake each other, and the end
    is one more.
    """
    groups: dict[bytes, list[bytes]] = {}
    for event in answer.events:
        found = _INDEX.search(event)
        groups.setdefault(found[1] if found else b"none", []).append(masked(event))
    return groups


def _first(one: bytes, two: bytes) -> str:
    if one == two:
        return ""
    at = next(
        (at for at, (x, y) in enumerate(zip(one, two, strict=False)) if x != y),
        min(len(one), len(two)),
    )
    begin = max(at - 120, 0)
    return f"at byte {at}:\n  {one[begin : at + 160]!r}\n  {two[begin : at + 160]!r}"
