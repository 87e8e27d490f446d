"""The model: which token follows, given what attention reads from the KV cache. Pure.

Owns the rule that makes wrong KV visible: a token depends only on the digest of all KV in the
request's blocks and on the sampling parameters. Wrong KV gives wrong text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pdproxy_lab.sim.request import Candidate, Grammar, SamplingParams, Token
from pdproxy_lab.sim.tokenizer import (
    EOS,
    FIRST_BYTE,
    FIRST_PIECE,
    IM_START,
    THINK,
    THINK_END,
    WITH_SPACE,
    BuiltInTokenizer,
)

_MASK = (1 << 64) - 1
_CHOICES = 20
"""A sampled token is one of the likeliest, so many of them."""
_MULTI_BYTE = 29
"""One word in so many is a character of several bytes, with one token per byte."""
_STRONG_BIAS = 50.0
_MIN_THOUGHTS, _MORE_THOUGHTS = 8, 6
"""The minimum number of tokens of thoughts, and how many more on average."""
_ROLE = BuiltInTokenizer().encode("assistant\n")
"""What is between the mark of an answer and the answer."""


def mix(*parts: int) -> int:
    """Return 64 well mixed bits of some integers, the same in every process."""
    state = hash(parts) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def fold(digest: int, token: int) -> int:
    """Return the digest after attention has read one more position."""
    return hash((digest, token)) & _MASK


class Language:
    """Draws tokens. `eos_every`: average number of tokens before the end; 0: never. `thinks`:
    thoughts come first.
    """

    def __init__(self, eos_every: int, *, thinks: bool = False, begun: int = 0) -> None:
        self._eos_every = eos_every
        self._thinks = thinks
        self._begun = begun
        """Tokens of thoughts that the prompt ends with, `_MIN_THOUGHTS` at most."""
        self._others = (
            [Language(eos_every, thinks=True, begun=one) for one in range(1, _MIN_THOUGHTS + 1)]
            if (thinks and not begun)
            else []
        )
        self._behind_thoughts = Language(eos_every) if self._others else self

    def thoughts_begun(self, prompt: Sequence[int]) -> int | None:
        """Return how many tokens of thoughts a prompt ends with, `_MIN_THOUGHTS` at most; None if
        it ends behind thoughts.
        """
        if (
            not self._thinks
            or next((one for one in reversed(prompt) if one in (THINK, THINK_END)), None)
            == THINK_END
        ):
            return None
        since = next((back for back, token in enumerate(reversed(prompt)) if token == IM_START), 0)
        begins = len(prompt) - since
        if list(prompt[begins : begins + len(_ROLE)]) != _ROLE:
            return 0
        return min(since - len(_ROLE), _MIN_THOUGHTS)

    def behind(self, thoughts: int | None) -> Language:
        """Return what draws the tokens behind a prompt with so many thoughts, as of
        `thoughts_begun`.
        """
        return (
            self._behind_thoughts
            if thoughts is None
            else self._others[thoughts - 1]
            if thoughts
            else self
        )

    def prompt_scores(
        self, seed: int, prompt: Sequence[int], top: int
    ) -> tuple[tuple[Candidate, ...] | None, ...]:
        """Return the `top` candidates for each token of a prompt, None for the first. `seed`: the
        digest before it.
        """
        entries: list[tuple[Candidate, ...] | None] = [None]
        state = seed
        for before, token in pairwise(prompt):
            state = fold(state, before)
            entries.append(self.score(state, token, top))
        return tuple(entries)

    def next_token(
        self,
        state: int,
        generated: Sequence[int],
        sampling: SamplingParams,
        draw: int,
        recent: Sequence[int] = (),
    ) -> Token:
        """Return the token that follows.

        Args:
            state: the digest of all KV of the request.
            generated: the tokens made so far.
            recent: the last three tokens of the prompt and the generated ones, to complete a
                character that was begun.
            sampling: how to choose.
            draw: 64 random bits for this token; unused at temperature 0.
        """
        budget = sampling.thinking_token_budget
        if (
            self._thinks
            and budget is not None
            and len(generated) >= budget
            and THINK_END not in generated
        ):
            return self._token(state, generated, recent, sampling, THINK_END, 1, -0.01)
        if sampling.grammar is not None:
            allowed = self._allowed(sampling.grammar, generated)
            if allowed is not None:
                pick = draw if sampling.temperature > 0 else mix(state, 1)
                return self._token(
                    state, generated, recent, sampling, allowed[pick % len(allowed)], 1, -0.05
                )
        skip = 0
        if sampling.temperature > 0:
            skip = min(
                int(
                    -math.log(1.0 - (draw % (1 << 53)) / (1 << 53)) * min(sampling.temperature, 4.0)
                ),
                _CHOICES - 1,
            )
        forced = [token for token, bias in sampling.logit_bias.items() if bias >= _STRONG_BIAS]
        if forced:
            return self._token(state, generated, recent, sampling, min(forced), 1, -0.01)
        banned = _banned(generated, sampling)
        last: Candidate | None = None
        for candidate in self._candidates(state, generated, recent):
            if candidate.token in banned:
                continue
            last = candidate
            if skip <= 0:
                break
            skip -= 1
        assert last is not None
        return self._token(state, generated, recent, sampling, last.token, last.rank, last.logprob)

    def _allowed(self, grammar: Grammar, generated: Sequence[int]) -> Sequence[int] | None:
        """Return the ids that may follow, None: any. A grammar of texts binds no thoughts."""
        if not self._thinks or grammar.binds_thoughts:
            return grammar.allowed(generated)
        if THINK_END not in generated:
            return None
        return grammar.allowed(generated[list(generated).index(THINK_END) + 1 :])

    def score(self, state: int, token: int, top: int) -> tuple[Candidate, ...]:
        """Return a prompt token's own probability, then the likeliest ones: an entry of
        `prompt_logprobs`.
        """
        found = zip(self._candidates(state, (), ()), range(max(top, 0)), strict=False)
        likeliest = [candidate for candidate, _ in found]
        own = next((candidate for candidate in likeliest if candidate.token == token), None)
        if own is None:
            bits = mix(state, token)
            own = Candidate(token, -8.0 - (bits % 4096) / 1024, _CHOICES + 1 + bits % 900)
        return (own, *(candidate for candidate in likeliest if candidate.token != token))

    def _token(
        self,
        state: int,
        generated: Sequence[int],
        recent: Sequence[int],
        sampling: SamplingParams,
        token: int,
        rank: int,
        logprob: float,
    ) -> Token:
        if sampling.logprobs is None:
            return Token(token)
        found = zip(
            self._candidates(state, generated, recent), range(sampling.logprobs), strict=False
        )
        return Token(token, logprob, rank, tuple(candidate for candidate, _ in found))

    def _thoughts_end(self, bits: int, generated: Sequence[int]) -> bool:
        enough = self._begun + len(generated) >= _MIN_THOUGHTS and bits % _MORE_THOUGHTS == 0
        return enough and THINK_END not in generated

    def _candidates(
        self, state: int, generated: Sequence[int], recent: Sequence[int]
    ) -> Iterator[Candidate]:
        """Yield distinct tokens, likeliest first."""
        missing = _missing_bytes(recent)
        seen: set[int] = set()
        rank, number = 0, 0
        logprob = -0.2 - (mix(state, 7) % 1024) / 4096
        while True:
            bits = mix(state, number)
            number += 1
            if missing:
                token = FIRST_BYTE + (0x9F if recent[-1] == FIRST_BYTE + 0xF0 else 0x80 + bits % 64)
                # all continuations were used, or there is only one: any token may follow
                if token in seen:
                    missing = 0 if number > 256 or recent[-1] == FIRST_BYTE + 0xF0 else missing
                    continue
            elif number == 1 and self._thinks and self._thoughts_end(bits, generated):
                token = THINK_END
            elif number == 1 and self._eos_every and bits % self._eos_every == 0:
                token = EOS
            elif bits % _MULTI_BYTE == 0:
                token = FIRST_BYTE + (0xC3, 0xE4, 0xE5, 0xE6, 0xF0)[(bits >> 16) % 5]
            elif bits % 7 == 0:
                token = FIRST_PIECE + (bits >> 16) % (2 * len(WITH_SPACE))
            else:
                token = WITH_SPACE[(bits >> 16) % len(WITH_SPACE)]
            if token in seen:
                continue
            seen.add(token)
            rank += 1
            yield Candidate(token, logprob, rank)
            logprob -= 0.35 + (bits % 512) / 2048


def _missing_bytes(recent: Sequence[int]) -> int:
    """Return how many bytes the character that was begun last still lacks."""
    for back, token in enumerate(reversed(recent)):
        byte = token - FIRST_BYTE
        if not 0 <= byte < 256 or byte < 0x80:
            return 0
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return length - 1 - back
    return 0


def _banned(generated: Sequence[int], sampling: SamplingParams) -> set[int]:
    banned = {token for token, bias in sampling.logit_bias.items() if bias <= -_STRONG_BIAS}
    if len(generated) < sampling.min_tokens:
        banned |= {EOS, *sampling.stop_token_ids}
    for word in sampling.bad_words:
        begin = word[:-1]
        if not begin or tuple(generated[-len(begin) :]) == begin:
            banned.add(word[-1])
    if (
        sampling.repetition_penalty > 1
        or sampling.presence_penalty > 0
        or sampling.frequency_penalty > 0
    ):
        banned.update(token for token in generated if token >= FIRST_PIECE)
    return banned
