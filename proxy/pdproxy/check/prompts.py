"""The check's prompts and bodies, and how its answers are read. Pure; unique marks are passed in.

Every body is greedy and of fixed length, so that two engines with the same weights generate the
same. A prompt whose KV has to move begins with a `mark` that no engine has seen, because a cached
prefix would not move.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from hashlib import blake2b

import msgspec

from pdproxy.check.facts import Encoding, Generated
from pdproxy.transfer import encoders
from pdproxy.wire.engine import UNREADABLE, Usage
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route

PATH = Route.COMPLETIONS.path
LENGTH = 8
"""Tokens of an answer."""
BLOCKS = 3
"""The minimum number of KV blocks that a prompt fills."""

CANARIES = (
    "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen,",
    "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z. Again: A B C D E F G H I J",
)
"""Prompts with one likely continuation: near-ties between tokens, which two machines may decide
differently, are rare.
"""

_SIDE = 64
"""Pixels of a picture: models with vision take none that is much smaller."""

_SENTENCE_TOKENS = 6  # the minimum with any tokenizer


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage = Usage()
    created: float = 0.0
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class _Encoded(msgspec.Struct):
    usage: Usage = Usage()


_answer_decoder = msgspec.json.Decoder(_Answer)
_encoded_decoder = msgspec.json.Decoder(_Encoded)


def counting(mark: str, block_size: int, max_model_len: int | None) -> str:
    """Return a prompt of at least `BLOCKS` blocks, or as long as `max_model_len` certainly
    allows.
    """
    count = BLOCKS * block_size // _SENTENCE_TOKENS + 2
    text = f"{mark}: " + " ".join(f"After {number} comes {number + 1}." for number in range(count))
    return fitting(text, max_model_len)


def fitting(text: str, max_model_len: int | None) -> str:
    """Return the part of an ASCII text that certainly fits: a byte-level tokenizer makes no more
    tokens than bytes.
    """
    return text if max_model_len is None else text[: max(max_model_len - LENGTH - 8, 16)]


def body(model: str, prompt: str, *, salt: str = "") -> bytes:
    """Return a completion's body. With a new `salt` the engine uses no cached KV."""
    fields: dict[str, object] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": LENGTH,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": False,
    }
    return msgspec.json.encode(fields | ({"cache_salt": salt} if salt else {}))


def parsed(model: str, prompt: str) -> Parsed:
    """Return the same completion as the proxy would have read it."""
    return parse(Route.COMPLETIONS, body(model, prompt))


def picture(mark: str) -> dict[str, object]:
    """Return a content part with a picture: a square in one colour, which is of the mark, so that
    no engine has encoded the picture before.
    """
    rows = (b"\0" + blake2b(mark.encode(), digest_size=3).digest() * _SIDE) * _SIDE
    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        png += struct.pack(">I", len(data)) + kind + data
        png += struct.pack(">I", zlib.crc32(kind + data))
    url = f"data:image/png;base64,{b64encode(png).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def to_encode(model: str, mark: str) -> bytes:
    """Return what the proxy would send an encoder engine for a request with a picture. It names no
    engine that uses the output.
    """
    part = picture(mark)
    fields = {"model": model, "messages": [{"role": "user", "content": [part]}]}
    request = parse(Route.CHAT, msgspec.json.encode(fields))
    return encoders.body(request, request.prompts[0].media, None)


def encoding(content: bytes) -> Encoding:
    """Read an encoder engine's answer to a picture."""
    outputs = encoders.outputs_in(content, 1)
    try:
        usage = _encoded_decoder.decode(content).usage
    except UNREADABLE:
        usage = Usage()
    why_not = outputs if isinstance(outputs, str) else ""
    return Encoding(why_not, usage.completion_tokens or 0)


def salted(request: Parsed, salt: str) -> bytes:
    """Return the same completion with a salt, so that the engine uses no cached KV."""
    return msgspec.json.encode({**request.fields, "cache_salt": salt})


def generated(content: bytes) -> Generated | None:
    """Read a completion; None if the content is not one."""
    try:
        answer = _answer_decoder.decode(content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if not answer.choices:
        return None
    choice = answer.choices[0]
    details = answer.usage.prompt_tokens_details is not None
    kept = bytes(answer.kv_transfer_params)
    return Generated(
        choice.text,
        tuple(choice.token_ids or ()),
        details,
        answer.created,
        None if kept == b"null" else kept,
    )
