"""Whether other engines go on with streams whose engines fail: the section `continuations`."""

from __future__ import annotations

from typing import Literal

from pdproxy.settings.section import Count, Section


class Continuations(Section, frozen=True):
    """Streams that other engines go on with when theirs fails (limits.continuations)."""

    sampled: bool = True
    """Also answers that are drawn by chance (temperature above 0, no seed): another rest than the one that was lost, as good as
    that."""

    max_bytes: Count = 268_435_456
    """Bytes that are kept of all streams for that, 256 MiB: mostly the token ids of their prompts, 6 bytes each. That is enough
    for 1000 streams with prompts of 40,000 tokens. What exceeds it ends with an error when its engine fails."""

    parsed: Literal["auto", "off"] = "auto"
    """auto: also chats with tools, or in the middle of their reasoning, where all engines of the model run with
    --enable-scale-out: they parse what the engine that goes on makes. off: such chats end with an error, and engines are not
    asked whether they can parse."""

    max_parsed_tokens: Count = 8192
    """Tokens of a prompt and its answer together up to which such a chat goes on: engines parse all of it again for each
    piece."""
