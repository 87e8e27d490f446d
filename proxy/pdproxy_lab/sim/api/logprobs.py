"""Log probabilities in the shapes of the two routes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdproxy_lab.sim.request import Candidate, Token
from pdproxy_lab.sim.tokenizer import BuiltInTokenizer

Entry = tuple[Candidate, ...] | None
"""One position: its own token first, then the likeliest; None: unknown (a prompt's first token)."""


def entry_of(token: Token) -> Entry:
    """Return a generated token's entry."""
    own = Candidate(token.id, token.logprob, token.rank)
    return (own, *(candidate for candidate in token.top if candidate.token != token.id))


def completion_logprobs(
    tokenizer: BuiltInTokenizer,
    ids: Sequence[int],
    entries: Sequence[Entry],
    top: int,
    offset: int,
    as_ids: bool,
) -> tuple[dict[str, Any], int]:
    """Return `logprobs` of a completion's choice, and the text offset after it."""
    offsets, logprobs, tokens, tops = [], [], [], []
    for token, entry in zip(ids, entries, strict=True):
        text = _text(tokenizer, token, as_ids)
        offsets.append(offset)
        offset += len(text)
        tokens.append(text)
        logprobs.append(None if entry is None else entry[0].logprob)
        kept = None if entry is None else entry if top == -1 else entry[: top + 1]
        tops.append(
            None if kept is None else {_text(tokenizer, c.token, as_ids): c.logprob for c in kept}
        )
    return {
        "text_offset": offsets,
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": tops,
    }, offset


def chat_logprobs(
    tokenizer: BuiltInTokenizer, tokens: Sequence[Token], top: int, as_ids: bool
) -> dict[str, Any]:
    """Return `logprobs` of a chat's choice."""
    content = []
    for token in tokens:
        entry = entry_of(token) or ()
        kept = entry if top == -1 else entry[:top]
        content.append(
            _chat_entry(tokenizer, entry[0], as_ids)
            | {"top_logprobs": [_chat_entry(tokenizer, c, as_ids) for c in kept]}
        )
    return {"content": content}


def prompt_logprobs(
    tokenizer: BuiltInTokenizer, entries: Sequence[Entry] | None
) -> list[dict[str, Any] | None] | None:
    """Return `prompt_logprobs`: for each prompt token a map from token id to its probability."""
    if entries is None:
        return None
    return [
        None
        if entry is None
        else {
            str(c.token): {
                "logprob": c.logprob,
                "rank": c.rank,
                "decoded_token": tokenizer.decode([c.token]),
            }
            for c in entry
        }
        for entry in entries
    ]


def _chat_entry(tokenizer: BuiltInTokenizer, candidate: Candidate, as_ids: bool) -> dict[str, Any]:
    text = _text(tokenizer, candidate.token, as_ids)
    return {"token": text, "logprob": candidate.logprob, "bytes": list(text.encode())}


def _text(tokenizer: BuiltInTokenizer, token: int, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else tokenizer.decode([token], skip_special_tokens=False)
