"""Whether other engines go on with streams whose engines fail: the section `continuations`."""

from __future__ import annotations

from typing import Literal

from pdproxy.settings.section import Count, Section


class Continuations(Section, frozen=True):
    """What is kept of streams so that another engine can go on with them. `limits.continuations` says how often."""

    sampled: bool = True
    """Also where the answer is drawn by chance (temperature above 0, no seed): the rest then is as good as the one that was lost,
    but another one."""

    max_bytes: Count = 268_435_456
    """Bytes that are kept of all streams, 256 MiB: the token ids of their prompts, 6 bytes each. That is enough for 1000 streams
    with prompts of 40,000 tokens. A stream beyond it ends with an error when its engine fails."""

    parsed: Literal["auto", "off"] = "auto"
    """Also chats whose events a parser makes: with tools, or in the middle of their reasoning. Only where all engines of the
    model run with `--enable-scale-out`: they parse what the engine that goes on makes. off: such chats end with an error, and
    engines are not asked whether they can parse."""

    max_parsed_tokens: Count = 8192
    """Tokens of a prompt and its answer together up to which such a chat goes on. Engines parse all of the answer again for
    each piece of it, and are sent all of both."""
