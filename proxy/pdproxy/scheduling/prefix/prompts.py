"""What prompts are known by: the keys of their token ids, or of their text where nothing has made
ids. Pure.

Text is approximate: engines with the same chat template make the same ids of the same beginning of
a text, so equal texts are equal beginnings, but where an engine's blocks end in it is not known.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdproxy.scheduling.prefix.keys import PromptKeys, of_ids, of_text, root, text_root
from pdproxy.tokens.ids import TokenIds
from pdproxy.wire.fields import STRING, is_absent
from pdproxy.wire.request import Parsed
from pdproxy.wire.route_form import Prompt

MAX_KEYS = 4096
"""So much of a prompt's beginning is known, in units: 65,536 tokens of 16 each. A search takes half
a millisecond.
"""
QUICK_KEYS = 1024
"""Keys that are made in the event loop: some 0.7 ms. More are made in a thread."""
MAX_SALT = 1024
"""Bytes of a `cache_salt`. Prompts with a longer one are not known."""
TOKEN_TEXT = 4
"""Bytes of text per token, as a first estimate."""
_NO_TEXT = msgspec.Raw(b"")


class PromptBeginning:
    """A prompt as indexes know it, and what they have found of it.

    `tokens`: the prompt's length, estimated where `of_text`, and while `is_begun`: then its keys
    are those of its first ids, and no engine has more of it. `unit`: tokens per key, estimated as
    the length of a text. `root`: the key before the first one. `sent_to`: the engines (their URLs)
    that a prompt that `is_begun` was sent to. `found`: tokens that engines should have in their
    caches, by URL, as of `found_at` (monotonic seconds); None before it was looked up.
    """

    __slots__ = (
        "found",
        "found_at",
        "is_begun",
        "keys",
        "of_text",
        "root",
        "sent_to",
        "tokens",
        "unit",
    )

    def __init__(
        self, keys: PromptKeys, tokens: int, unit: int, *, of_text: bool, root: int = 0
    ) -> None:
        self.keys = keys
        self.tokens = tokens
        self.unit = unit
        self.of_text = of_text
        self.root = root
        self.is_begun = False
        self.sent_to: list[str] = []
        self.found: Mapping[str, int] | None = None
        self.found_at = 0.0

    def __repr__(self) -> str:
        return f"<Beginning of {self.tokens} tokens{', by its text' if self.of_text else ''}>"

    def begin(self, tokens: int) -> None:
        """Have its ids be only the first ones of a prompt of about so many tokens."""
        self.tokens, self.is_begun = tokens, True

    def keys_of(self, ids: TokenIds) -> PromptKeys:
        """Return the keys of all ids of a prompt of which only the first ones were known."""
        return of_ids(ids, self.unit, self.root, MAX_KEYS)

    def complete(self, keys: PromptKeys, tokens: int) -> None:
        """Know the prompt by all its keys, which are made. `tokens`: its length."""
        self.keys, self.tokens, self.is_begun, self.found = keys, tokens, False, None

    def measure(self, text_per_token: float) -> None:
        """Estimate the tokens of a text anew, which was estimated by `TOKEN_TEXT`."""
        self.tokens = max(1, round(self.tokens * TOKEN_TEXT / text_per_token))
        self.unit = max(1, round(self.unit * TOKEN_TEXT / text_per_token))

    @property
    def is_long(self) -> bool:
        """Whether making its keys may take longer than the event loop should wait."""
        return self.tokens > QUICK_KEYS * self.unit


def beginning_of(
    parsed: Parsed,
    prompt: Prompt,
    ids: TokenIds | None,
    unit: int,
    *,
    is_adapter: bool,
    text_per_token: float = TOKEN_TEXT,
) -> PromptBeginning | None:
    """Return what a prompt is known by, None if nothing can be said of it. `unit`: tokens per key.

    `is_adapter`: whether its model is a LoRA adapter. Keys are made when they are asked for.
    """
    fields = parsed.fields
    if not is_absent(fields, "truncate_prompt_tokens"):
        return None  # engines cut it at its beginning
    adapter, salt = parsed.model if is_adapter else None, None
    if not is_absent(fields, "cache_salt"):
        if memoryview(fields["cache_salt"]).nbytes > MAX_SALT:
            return None
        try:
            salt = STRING.decode(fields["cache_salt"])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
    if ids is None and prompt.tokens is not None and prompt.raw is not None:
        ids = TokenIds(
            bytes(memoryview(prompt.raw)[: MAX_KEYS * unit * 12]), prompt.tokens
        )  # 10 digits and a separator
    if ids is not None:
        start = root(adapter, salt)
        keys = of_ids(ids, unit, start, MAX_KEYS)
        return PromptBeginning(keys, ids.count, unit, of_text=False, root=start)
    size = unit * TOKEN_TEXT
    if prompt.raw is not None:
        text, total = (
            bytes(memoryview(prompt.raw)[: MAX_KEYS * size]),
            memoryview(prompt.raw).nbytes,
        )
    else:
        most, names = MAX_KEYS * size, parsed.route.form.prompt_fields
        parts = [memoryview(fields.get(name, _NO_TEXT)) for name in names]
        text = b"\0".join([part[:most] for part in parts])
        total = sum([part.nbytes for part in parts])
    keys = of_text(text[: MAX_KEYS * size], size, text_root(adapter, salt))
    tokens = max(1, round(total / text_per_token))
    return PromptBeginning(keys, tokens, max(1, round(size / text_per_token)), of_text=True)
