"""Whether two answers of engines are alike, words aside: status, headers, keys in their order,
types, nulls, values. Pure.

Everything must be equal but what two models, two tokenizers or two runs cannot have in common:
texts, ids, times, counts of prompt tokens, numbers of blocks and ports. Those must be of the same
kind, and the counts must agree with each other inside an answer. Errors are compared byte for byte.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_UUID = re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_HEX = re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{8,}(?![0-9A-Za-z])")
_CHAT_ID = re.compile(rb"chatcmpl-[0-9a-f]{16}")
_DATE = re.compile(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT")
_IDS = {
    "id",
    "item_id",
    "request_id",
    "remote_engine_id",
    "remote_request_id",
    "system_fingerprint",
}
_WORDS = {"text", "content", "refusal", "reasoning", "delta", "token"}
_ANY_NUMBER = {"created", "created_at", "remote_port", "first_tok", "sequence_number", "token_id"}
_OF_PROMPT = {"prompt_tokens", "input_tokens", "total_tokens", "remote_num_tokens", "count"}
_HITS = {
    "cached_tokens",
    "created_cache_tokens",
    "remote_prefill_cached_tokens",
    "cache_write_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
}


@dataclass(frozen=True)
class Seen:
    """An answer: its first line, its headers in their order (names in lower case), its body without
    the chunks' framing.

    A recording may not have kept the first line, the headers, or that the answer was a stream.
    """

    status: int
    body: bytes
    line: str | None = None
    headers: dict[str, str] | None = None

    @property
    def streamed(self) -> bool:
        """Whether the body is a stream of events."""
        return (self.headers or {}).get("content-type", "").startswith("text/event-stream")

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def events(self) -> list[bytes]:
        """A stream's events as they came, ends included; what follows the last whole one is one
        more.
        """
        *whole, rest = self.body.split(b"\n\n")
        return [event + b"\n\n" for event in whole] + ([rest] if rest else [])


def differences(
    wanted: Seen, got: Seen, *, block_size: int, same_prompt: bool = False
) -> list[str]:
    """Return where an answer is unlike another one, a line each; `same_prompt`: both engines count
    the same prompt tokens.
    """
    found = _heads(wanted, got)
    if wanted.streamed or got.streamed:
        found += unlike(stream_view(wanted, same_prompt), stream_view(got, same_prompt))
    else:
        found += unlike(body_view(wanted, same_prompt), body_view(got, same_prompt))
    return found + inconsistencies(got, block_size)


def _heads(wanted: Seen, got: Seen) -> list[str]:
    found = unlike(wanted.status, got.status, "status")
    if wanted.line is not None:
        found += unlike(wanted.line, got.line, "first line")
    if wanted.headers is not None:
        found += unlike(_headers(wanted), _headers(got), "headers")
    if (length := (got.headers or {}).get("content-length")) is not None:
        found += unlike(len(got.body), int(length), "content-length")
    return found


def _headers(seen: Seen) -> dict[str, str]:
    masked = dict(seen.headers or {})
    if _DATE.fullmatch(masked.get("date", "")):
        masked["date"] = "a date"
    if "content-length" in masked and seen.status == 200:
        masked["content-length"] = "a length"
    return masked


def body_view(seen: Seen, same_prompt: bool = False) -> Any:
    """A whole body as it must be alike: an error's bytes but for an id, JSON as `view` has it, and
    whether it is written without spaces.
    """
    if seen.status != 200 or not seen.body.startswith(b"{"):
        return _CHAT_ID.sub(b"chatcmpl-<id>", seen.body)
    return _document(seen.body, same_prompt)


def stream_view(seen: Seen, same_prompt: bool = False) -> list[Any]:
    """A stream as it must be alike, event by event. Of events with names, deltas that follow each
    other are one: a busy engine joins them.
    """
    views = [event_view(event, same_prompt) for event in seen.events]
    pairs = zip([None, *views], views, strict=False)
    return [view for before, view in pairs if view != before or not _is_delta(view)]


def _is_delta(view: Any) -> bool:
    return isinstance(view, dict) and str(view.get("event", "")).endswith("delta")


def event_view(event: bytes, same_prompt: bool = False) -> Any:
    """An event as it must be alike: errors and what is no JSON to the byte."""
    if event.startswith(b"event: ") and not event.startswith(b"event: error\n"):
        name, _, data = event[7:].partition(b"\ndata: ")
        return {"event": name.decode(), **_document(data[:-2], same_prompt)}
    if (
        not event.startswith(b"data: {")
        or event.startswith(b'data: {"error"')
        or not event.endswith(b"\n\n")
    ):
        return event
    return _document(event[6:-2], same_prompt)


def _document(data: bytes, same_prompt: bool) -> Any:
    value = json.loads(data)
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() == data
    return {"compact": compact, "value": view(value, same_prompt)}


def view(value: Any, same_prompt: bool = False, key: str = "") -> Any:
    """A JSON value with what may differ replaced by what it is; maps keep their keys in order."""
    if isinstance(value, dict):
        if value.get("type") == "raw_message_tokens":
            value = {**value, "message": "text"}
        if key == "top_logprobs" and "logprob" not in value:  # a completion's: its keys are texts
            return {f"token {number}": view(item) for number, item in enumerate(value.values())}
        role = "role" in value and value.get("content") == ""  # a stream's first chunk has no words
        return {
            name: item if role and name == "content" else view(item, same_prompt, name)
            for name, item in value.items()
        }
    if isinstance(value, list):
        if key == "bytes":
            return "bytes"
        if (
            key in ("prompt_token_ids", "tokens")
            and not same_prompt
            and all(type(item) is int for item in value)
        ):
            return "token ids"
        if key == "remote_block_ids" and not same_prompt:
            return ["block ids" for _ in value]
        return [view(item, same_prompt, key) for item in value]
    return _scalar(value, key, same_prompt)


def _scalar(value: Any, key: str, same_prompt: bool) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if key in _WORDS or key == "tokens":
            return "text"
        return (
            _HEX.sub(lambda found: f"<{len(found[0])} hex>", _UUID.sub("<uuid>", value))
            if key in _IDS
            else value
        )
    if isinstance(value, float):
        return "float"
    if key in _HITS:
        return "tokens" if value else 0
    if key in _ANY_NUMBER or key in (
        "token_ids",
        "prompt_token_ids",
        "text_offset",
        "remote_block_ids",
        "tokens",
    ):
        return "integer"
    return "integer" if key in _OF_PROMPT and not same_prompt else value


def unlike(wanted: Any, got: Any, place: str = "$") -> list[str]:
    """Return where two values differ, types and the order of keys included, a line each."""
    if isinstance(wanted, dict) and isinstance(got, dict):
        if list(wanted) != list(got):
            return [f"{place}: keys {list(got)}, wanted {list(wanted)}"]
        return [line for key in wanted for line in unlike(wanted[key], got[key], f"{place}.{key}")]
    if isinstance(wanted, list) and isinstance(got, list):
        if len(wanted) != len(got):
            return [
                (
                    f"{place}: {len(got)} items, wanted {len(wanted)}: {_short(got)}, wanted "
                    f"{_short(wanted)}"
                )
            ]
        pairs = enumerate(zip(wanted, got, strict=True))
        return [
            line for number, (one, two) in pairs for line in unlike(one, two, f"{place}[{number}]")
        ]
    if type(wanted) is type(got) and wanted == got:
        return []
    return [f"{place}: {_short(got)}, wanted {_short(wanted)}"]


def _short(value: object, most: int = 400) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def inconsistencies(seen: Seen, block_size: int) -> list[str]:
    """Return which counts in an answer contradict each other, a line each."""
    if seen.status != 200 or not (seen.streamed or seen.body.startswith(b"{")):
        return []
    bodies = (
        [seen.json]
        if not seen.streamed
        else [json.loads(event[6:]) for event in seen.events if b"{" in event[:7]]
    )
    found: list[str] = []
    prompt_ids = 0
    one_choice = all(choice["index"] == 0 for body in bodies for choice in body.get("choices", ()))
    for body in bodies:
        choices = body.get("choices") or []
        prompt_ids += sum(len(one.get("prompt_token_ids") or ()) for one in (body, *choices))
        if "count" in body:
            found += unlike(len(body["tokens"]), body["count"], "count of tokens")
        if (usage := body.get("usage")) and "prompt_tokens" in usage:
            prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
            found += unlike(prompt + completion, usage["total_tokens"], "total_tokens")
            if prompt_ids and one_choice:
                found += unlike(prompt_ids, prompt, "prompt_tokens")
            if (handle := _handle(body)) and one_choice:
                found += unlike(
                    prompt + completion - 1, handle["remote_num_tokens"], "remote_num_tokens"
                )
        if handle := _handle(body):
            blocks = -(-handle["remote_num_tokens"] // block_size)
            found += unlike(
                [blocks], [len(group) for group in handle["remote_block_ids"]], "blocks"
            )
            hits = handle.get("remote_prefill_cached_tokens", 0)
            found += unlike(
                0, hits % block_size, "tokens in part of a block that are said to be cached"
            )
    return found


def _handle(body: dict[str, Any]) -> dict[str, Any] | None:
    """Return what leads to blocks on a prefill engine, as NIXL's handles do and others' parameters
    don't.
    """
    params = body.get("kv_transfer_params")
    return params if params and "remote_block_ids" in params else None
