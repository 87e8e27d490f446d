"""Compares the answers of two engines: masks what must differ, and returns the first other
difference.
"""

import copy
import math
import re
from collections.abc import Set as AbstractSet
from typing import Any

from .client import Answer

# The plain engine computes a prompt's last token in the prefill, a split one in decoding: the same
# sum in another order.
LOGPROB_TOLERANCE = 2e-3
MASKED = {"system_fingerprint", "created"}
_CLOCK = re.compile(r"\[\d\d:\d\d:\d\d\]")  # xgrammar puts a time into its errors
_MINTED = re.compile(r"^(cmpl-|chatcmpl-tool-|chatcmpl-|call_)?[0-9a-f-]{16,}$")


def differs(
    plain: Answer,
    other: Answer,
    *,
    strict: bool = True,
    warm: bool = False,
    ignored: AbstractSet[str] = frozenset(),
) -> str:
    """Return the first difference between two answers; empty if there is none.

    `warm`: one of the engines may have cached the prompt, so cached tokens are not compared.
    `ignored`: keys that are not compared, since they may be missing.
    `strict` also compares chunk by chunk. A late engine puts two tokens into one chunk; this is
    accepted if the first one has text, or is a part of a character. Rarely this is not enough: then
    send the request again.
    """
    if plain.status != other.status:
        return f"status: {plain.status} != {other.status}: {other.body[:500]!r}"
    if plain.broken != other.broken:
        return f"connection: {plain.broken!r} != {other.broken!r}"
    if (one := plain.headers.get("Content-Type")) != (two := other.headers.get("Content-Type")):
        return f"Content-Type: {one!r} != {two!r}"
    masked = MASKED | ({"cached_tokens", "created_cache_tokens"} if warm else set())
    if not plain.streamed:
        return first_difference(
            mask(plain.json, masked, ignored), mask(other.json, masked, ignored)
        )
    if plain.events[-1] != "[DONE]" or other.events[-1] != "[DONE]":
        return f"last event: {plain.events[-1]!r} != {other.events[-1]!r}"
    if why := mixed_ids(other):
        return why
    one, two = mask(plain.chunks, masked, ignored), mask(other.chunks, masked, ignored)
    if strict and (why := _split_differently(by_choice(one), by_choice(two))):
        return why
    return first_difference(joined(one), joined(two))


def mixed_ids(answer: Answer) -> str:
    """Return why a stream looks like a mix of several answers (two ids, times or models); empty if
    it does not.
    """
    for name in ("id", "created", "model"):
        if len(values := {chunk.get(name) for chunk in answer.chunks}) > 1:
            return f"the stream's chunks differ in {name}: {values}"
    return ""


def mask(value: Any, masked: set[str] = MASKED, ignored: AbstractSet[str] = frozenset()) -> Any:
    """Replace what always differs: minted ids, and the values under the keys in `masked` by whether
    they are not null.

    The keys in `ignored` are left out.
    """
    if isinstance(value, list):
        return [mask(item, masked, ignored) for item in value]
    if not isinstance(value, dict):
        return value
    out: dict[str, object] = {}
    for key, item in value.items():
        if key in ignored:
            continue
        if key == "id" and isinstance(item, str) and (minted := _MINTED.match(item)):
            out[key] = f"{minted[1] or ''}*"
        elif key == "message" and isinstance(item, str):
            out[key] = _CLOCK.sub("[*]", item)
        elif key in masked:
            out[key] = item is not None
        else:
            out[key] = mask(item, masked, ignored)
    return out


def by_choice(chunks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return the chunks of each choice in order: choices may overtake each other, a choice's own
    chunks may not.
    """
    groups: dict[str, list[Any]] = {}
    for chunk in chunks:
        indexes = (
            ",".join(str(choice["index"]) for choice in chunk.get("choices", ())) or "no choice"
        )
        groups.setdefault(indexes, []).append(chunk)
    return groups


def _split_differently(one: dict[str, list[Any]], two: dict[str, list[Any]]) -> str:
    """Return the first difference between corresponding chunks, after joining chunks that are
    shorter on one side.
    """
    if one.keys() != two.keys():
        return f"choices: {sorted(one)} != {sorted(two)}"
    for key in one:
        left, right = list(one[key]), list(two[key])
        at = 0
        while at < min(len(left), len(right)):
            while why := first_difference(left[at], right[at], f"$.{key}[{at}]"):
                shorter = left if _amount(left[at]) < _amount(right[at]) else right
                if not _may_be_joined(shorter, at):
                    return why
                shorter[at : at + 2] = [_glue(*shorter[at : at + 2])]
            at += 1
        if len(left) != len(right):
            return f"$.{key}: {len(left)} chunks != {len(right)} chunks"
    return ""


def _may_be_joined(chunks: list[dict[str, Any]], at: int) -> bool:
    """Return whether a slower engine may have put this chunk and the next one together: both have
    something, or this one and perhaps the next have nothing yet of a character that takes several
    tokens.
    """
    if at + 1 == len(chunks):
        return False
    if _amount(chunks[at]):
        return _amount(chunks[at + 1]) > 0
    if not all(_between(choice) for choice in chunks[at]["choices"]):
        return False
    following = next((text for chunk in chunks[at + 1 :] if (text := _text(chunk))), "")
    return not following[:1].isascii()


def _text(chunk: dict[str, Any]) -> str:
    deltas = [choice.get("delta", choice) for choice in chunk.get("choices", ())]
    return "".join(
        delta.get(key) or "" for delta in deltas for key in ("text", "content", "reasoning")
    )


def _amount(chunk: dict[str, Any]) -> int:
    """Return how many characters, token ids and logprobs a chunk adds to its choice."""
    total = 0
    for choice in chunk.get("choices", ()):
        delta = choice.get("delta", choice)
        total += sum(len(delta.get(key) or "") for key in ("text", "content", "reasoning"))
        total += len(choice.get("token_ids") or ()) + len(_logprobs(choice))
        total += sum(
            len(call["function"].get("arguments") or "") for call in delta.get("tool_calls") or ()
        )
    return total


def _logprobs(choice: dict[str, Any]) -> list[Any]:
    given = choice.get("logprobs") or {}
    return given.get("content") or given.get("tokens") or []


def _glue(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Join two chunks of one choice as a slower engine would have done."""
    out = copy.deepcopy(first)
    _join(out["choices"][0], second["choices"][0])
    return out | {key: value for key, value in second.items() if key != "choices"}


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a stream's content, independent of how it is split: each choice's joined deltas, the
    other fields, all keys.
    """
    out: dict[str, Any] = {"choices": {}, "usage": [], "beside": {}, "keys": set()}
    for chunk in (dict(chunk) for chunk in chunks):
        choices = chunk.pop("choices", [])
        usage = chunk.pop("usage", None)
        if usage and not choices:
            out["usage"].append(usage)
        # A late engine puts all tokens into its last chunk: chunks in between may be missing.
        between = bool(choices) and all(_between(choice) for choice in choices)
        if not between:
            out["keys"].add(",".join(sorted(chunk)))
        out["beside"].update({key: value for key, value in chunk.items() if value is not None})
        for choice in choices:
            if not between:
                out["keys"].add(",".join(sorted(choice)))
            _join(out["choices"].setdefault(choice["index"], {}), choice)
    out["keys"] = sorted(out["keys"])
    return out


def _between(choice: dict[str, Any]) -> bool:
    """Return whether a delta is neither the first nor the last of a choice."""
    return choice.get("finish_reason") is None and "role" not in (choice.get("delta") or {})


def _join(into: dict[str, Any], piece: dict[str, Any]) -> None:
    """Add a delta to the joined choice: texts and lists grow, objects are joined, other values must
    be equal.
    """
    for key, value in piece.items():
        if value is None:
            into.setdefault(key, None)
        elif key == "tool_calls":
            into[key] = into.get(key) or []
            # a delta may carry a call's name and its first arguments separately
            _join_calls(into[key], value)
        elif into.get(key) is None:
            into[key] = copy.deepcopy(value)
        elif isinstance(value, dict):
            _join(into[key], value)
        elif isinstance(value, list) or key in {"text", "content", "reasoning", "arguments"}:
            into[key] = into[key] + value
        elif into[key] != value:
            into[key] = f"{into[key]!r}, then {value!r}"


def _join_calls(into: list[dict[str, Any]], calls: list[dict[str, Any]]) -> None:
    for call in calls:
        known = next((have for have in into if have.get("index") == call.get("index")), None)
        if known is None:
            into.append(copy.deepcopy(call))
        else:
            _join(known, {key: value for key, value in call.items() if key != "index"})


def first_difference(one: Any, two: Any, path: str = "$") -> str:
    """Return the path of the first difference of two JSON values, with both; empty if equal. Floats
    may differ slightly.
    """
    if isinstance(one, float) and isinstance(two, float):
        return (
            ""
            if math.isclose(one, two, rel_tol=1e-3, abs_tol=LOGPROB_TOLERANCE)
            else f"{path}: {one} != {two}"
        )
    if type(one) is not type(two):
        return f"{path}: {_short(one)} != {_short(two)}"
    if isinstance(one, dict):
        if less := one.keys() - two.keys():
            return f"{path}: only plain has {sorted(less)}"
        if more := two.keys() - one.keys():
            return f"{path}: plain hasn't {sorted(more)}"
        return next(
            (why for key in one if (why := first_difference(one[key], two[key], f"{path}.{key}"))),
            "",
        )
    if isinstance(one, list):
        pairs = enumerate(zip(one, two, strict=False))
        why = next(
            (why for at, (x, y) in pairs if (why := first_difference(x, y, f"{path}[{at}]"))), ""
        )
        return why or (
            "" if len(one) == len(two) else f"{path}: {len(one)} items != {len(two)} items"
        )
    return "" if one == two else f"{path}: {_short(one)} != {_short(two)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 300 else text[:300] + "..."
