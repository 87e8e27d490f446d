"""Numbers and booleans that engines read in another form than their schema's: 4.0 for an integer, 0
for false.

Owns what such a value is for an engine (pydantic, not strict, vLLM 0.32.0). The value is written
anew as its schema has it, so that all others read one form. Engines judge all other forms: texts
with a number in them, numbers with a fraction.
"""

from __future__ import annotations

import re

import msgspec

from pdproxy.wire.fields import Fields

_INTEGERS = frozenset(
    {"n", "max_tokens", "max_completion_tokens", "min_tokens", "prompt_logprobs", "top_logprobs"}
)
_BOOLEANS = frozenset(
    {"stream", "echo", "use_beam_search", "return_token_ids", "return_prompt_text"}
)
_READ = _INTEGERS | _BOOLEANS
_INTEGER = re.compile(rb"(-?(?:0|[1-9][0-9]{0,14}))\.0{1,15}")
"""Every such number is exact as a float."""
_BOOLEAN = {b"0": b"false", b"1": b"true", b"0.0": b"false", b"1.0": b"true"}
_LONGEST = 32


def make_plain(fields: Fields) -> None:
    """Write such values anew, in their plain form."""
    for name in fields.keys() & _READ:
        raw = fields[name]
        if memoryview(raw).nbytes > _LONGEST:
            continue
        data = bytes(raw)
        if name in _BOOLEANS:
            plain = _BOOLEAN.get(data)
        elif b"." in data and (found := _INTEGER.fullmatch(data)) is not None:
            plain = found[1]
        else:
            plain = None
        if plain is not None:
            fields[name] = msgspec.Raw(plain)
