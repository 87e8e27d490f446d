"""Bodies of transcriptions and translations: forms with a file, of which only the other fields are
read, and what their answers say of the tokens that were used.

Owns what is read of such a form. Its fields become those of a JSON body, so that the rules for
models, keys and salts are the same as everywhere; of the form, only what these rules have changed
is written again. Source: vLLM 0.32.0 `entrypoints/speech_to_text`.
"""

from __future__ import annotations

import math
import re
from typing import Annotated

import msgspec

from pdproxy.kit.errors import BadRequestError
from pdproxy.wire.body_bounds import SMALL, Body
from pdproxy.wire.engine import UNREADABLE, Usage
from pdproxy.wire.fields import (
    NEVER_FROM_CLIENTS,
    Fields,
    lenient_integer,
    model_of,
    strip_handles,
)
from pdproxy.wire.form import Form, FormError, with_changes
from pdproxy.wire.passthrough_body import TRUE_TEXTS, PassedBody, Rename, Salt

FILE = "file"
LIMIT, BEAMS = "max_completion_tokens", "n"
"""The fields with numbers that keys may bound."""
MAX_TEXT = 256 * 1024
"""Bytes of all fields besides the file: more than the context of any speech model."""
TOKENS_PER_SECOND = 100
"""Of audio, as vLLM counts them for a Whisper model: one for 10 ms."""
BYTES_PER_SECOND = 8000
"""Of a file whose duration is not known: 64 kbit/s."""
_BYTES_PER_TOKEN = 4
"""Of a text."""
_ARGUMENTS = "vllm_xargs"
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_LIST = "[]"
"""How the name of a field ends that may come more than once."""
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


def speech_body(
    body: Body, form: Form, name: Rename | None = None, salt: Salt | None = None
) -> PassedBody:
    """Return the body that the engine gets. `name`, `salt`: see `wire.passthrough_body`.

    Raises:
        FormError: a field comes twice, or is no text, or they are too long.
        BadRequestError: `vllm_xargs` can't be read, or the salt is wrong.
    """
    texts, files, text_bytes = _read(body, form)
    fields = {one: _as_json(one, text) for one, text in texts.items()}
    came = dict(fields)
    for one in NEVER_FROM_CLIENTS:
        fields.pop(one, None)
    if _ARGUMENTS in texts:
        fields[_ARGUMENTS] = _arguments(texts[_ARGUMENTS])
    if salt is not None:
        salt(fields)
    model = model_of(fields)
    if name is not None and (real := name(model, fields)) != model:
        model = real
        fields["model"] = msgspec.Raw(msgspec.json.encode(real))
    changed = {one: _as_text(one, raw) for one, raw in fields.items() if came.get(one) is not raw}
    seconds = sum(len(memoryview(one)) for one in files.values()) / BYTES_PER_SECOND
    return PassedBody(
        with_changes(body, form, changed, came.keys() - fields.keys()),
        model,
        texts.get("stream", "").strip().lower() in TRUE_TEXTS,
        limit=lenient_integer(fields[LIMIT]) if LIMIT in fields else None,
        content_type=form.content_type,
        work=text_bytes + int(seconds * TOKENS_PER_SECOND) * _BYTES_PER_TOKEN,
        parts=fields | files,
    )


def _read(body: Body, form: Form) -> tuple[dict[str, str], Fields, int]:
    """Return the texts, the file, and the bytes of all texts, those of lists included."""
    texts: dict[str, str] = {}
    files: Fields = {}
    size = 0
    for part in form.parts:
        name = part.name
        if part.is_file and name != FILE:
            raise FormError(f"`{name}` is a file; only `{FILE}` may be one")
        if name in texts or name in files:
            raise FormError(f"`{name}` comes twice")
        if part.is_file:
            files[name] = msgspec.Raw(memoryview(body)[part.begin : part.end])
            continue
        size += part.end - part.begin
        if size > MAX_TEXT:
            raise FormError(f"the fields besides the file have more than {MAX_TEXT} bytes")
        if name.endswith(_LIST):
            continue
        try:
            texts[name] = bytes(body[part.begin : part.end]).decode()
        except UnicodeDecodeError:
            raise FormError(f"`{name}` is no text in UTF-8") from None
    return texts, files, size


def _as_json(name: str, text: str) -> msgspec.Raw:
    if name in (LIMIT, BEAMS) and _NUMBER.fullmatch(text):
        return msgspec.Raw(text.encode())
    return msgspec.Raw(msgspec.json.encode(text))


def _as_text(name: str, raw: msgspec.Raw) -> bytes:
    if name == _ARGUMENTS:
        return bytes(raw)
    value = msgspec.json.decode(raw)
    return str(value).encode()


def _arguments(text: str) -> msgspec.Raw:
    """Return the JSON in `vllm_xargs` without KV handles."""
    fields = {_ARGUMENTS: msgspec.Raw(text.encode())}
    try:
        if len(text) > SMALL:
            raise BadRequestError(
                f"`{_ARGUMENTS}` has more than {SMALL} characters", param=_ARGUMENTS
            )
        msgspec.json.decode(text)
        strip_handles(fields)
    except UNREADABLE:
        raise BadRequestError(
            f"Failed to parse {_ARGUMENTS}. Must be valid JSON", param=_ARGUMENTS
        ) from None
    return fields[_ARGUMENTS]


class _Duration(msgspec.Struct, frozen=True):
    seconds: _Seconds | None = None


class _Speech(msgspec.Struct, frozen=True):
    """`usage` is of a transcription, `duration` of one that is verbose; a translation has
    neither.
    """

    text: str
    usage: _Duration | None = None
    duration: _Seconds | None = None


_answers = msgspec.json.Decoder(_Speech)


def speech_usage(answer: bytes, prompt: int) -> Usage | None:
    """Return what a whole answer has used, None if it can't be read: vLLM reports seconds, and no
    tokens of the text. `prompt`: the likely tokens of the audio.
    """
    try:
        found = _answers.decode(answer)
    except UNREADABLE:
        return None
    seconds = found.duration if found.usage is None else found.usage.seconds
    if seconds is not None:
        prompt = math.ceil(seconds * TOKENS_PER_SECOND)
    made = -(-len(found.text.encode()) // _BYTES_PER_TOKEN)
    return Usage(prompt, prompt + made, made)
