"""How a pool's prompt tokens were served: by two engines, or by one alone, and why; since the start
for the metric, and of the last minutes for operators.

Owns the window, and when a share is a problem. A decode engine that computes whole prompts answers
them rightly, and no request fails: nothing else shows that prefill engines idle meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from pdproxy.observe.description import Label, Samples, counter
from pdproxy.observe.events import ALONE, LegTimes

WINDOW, PART = 300.0, 30.0
"""Seconds: the window has whole parts, so that it may be longer by one of them."""
MOST = 1 / 3
"""The part of the tokens that may be served beside idle prefill engines before it is a problem."""
FEW = 10
"""Fewer prompts in the window are no problem, however long they are."""
_CHOSEN = frozenset({"short_prompt", "decided"})
"""Reasons for which nobody would want the prompt to be split."""
_OF_REQUESTS = frozenset(
    {
        "n",
        "echo",
        "prompt_logprobs",
        "beam_search",
        "non_text",
        "prompt_ids",
        "built_in_tools",
        "route",
        "unusual",
    }
)
"""Reasons that clients cause, each with every such request."""
PROMPT_TOKENS = counter(
    "pdproxy_prompt_tokens_total",
    "tokens",
    "Tokens of prompts whose answers are generated, by how they were served, as "
    "pdproxy_tokens_total counts tokens",
    Label(
        "served",
        (
            ("split", "by two engines"),
            ("beside_idle", "by a decode engine alone, while a prefill engine had no request"),
            ("alone", "by one engine alone in all other cases"),
        ),
    ),
    Label("reason", (("none", "it was split"), *ALONE)),
    together=(
        ("split", "none"),
        *(("alone", reason) for reason, _ in ALONE),
        *(("beside_idle", reason) for reason, _ in ALONE if reason not in _CHOSEN),
    ),
)


class PromptShare(msgspec.Struct):
    """How prompts were served, in tokens."""

    split: Annotated[int, Meta(description="tokens of prompts that two engines served")] = 0
    alone: Annotated[
        dict[str, int],
        Meta(description="tokens of prompts that one engine served alone, by the reason"),
    ] = msgspec.field(default_factory=dict)
    beside_idle: Annotated[
        dict[str, int],
        Meta(
            description="tokens of prompts that a decode engine served alone although a prefill "
            "engine had no request, by the reason; not counted as alone"
        ),
    ] = msgspec.field(default_factory=dict)
    prompts: Annotated[int, Meta(description="how many prompts these last ones were")] = 0

    def combined(self, other: PromptShare, sign: int = 1) -> PromptShare:
        """Return the sum of both, or what this one has more than the other (`sign` -1)."""
        return PromptShare(
            self.split + sign * other.split,
            _sum(self.alone, other.alone, sign),
            _sum(self.beside_idle, other.beside_idle, sign),
            self.prompts + sign * other.prompts,
        )

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.split + sum(self.alone.values()) + sum(self.beside_idle.values())

    @property
    def whole(self) -> dict[str, int]:
        """Tokens of all prompts that one engine served alone, by the reason."""
        return _sum(self.alone, self.beside_idle)

    @property
    def idle(self) -> int:
        """Tokens of those that were served beside idle prefill engines."""
        return sum(self.beside_idle.values())

    def reasons(self, of: dict[str, int]) -> str:
        """Return reasons with their parts of all tokens, the largest one first."""
        ordered = sorted(of.items(), key=lambda item: -item[1])
        return ", ".join(f"{reason} {count / self.tokens:.0%}" for reason, count in ordered)

    def spelled(self) -> str:
        """Return it as a text for people."""
        tokens, whole = self.tokens, self.whole
        if not tokens:
            return "no prompts in the last 5 minutes"
        text = f"prompt tokens of the last 5 minutes: {self.split / tokens:.0%} split"
        if whole:
            part = sum(whole.values()) / tokens
            text += f", {part:.0%} served by one engine alone ({self.reasons(whole)})"
        if idle := self.idle:
            text += f", {idle / tokens:.0%} while a prefill engine had no request"
        return text

    def problem(self) -> str | None:
        """Return what is wrong, and what to do; None if nothing is."""
        tokens, idle = self.tokens, self.idle
        if self.prompts < FEW or idle <= MOST * tokens:
            return None
        most = max(self.beside_idle, key=self.beside_idle.__getitem__)
        what_to_do = (
            "have clients send what can be split, or let prefill engines serve prompts whole, too "
            "(nodes[].serves_whole)"
            if most in _OF_REQUESTS
            else "the log and the other details say why prompts are not split"
        )
        return (
            f"{idle / tokens:.0%} of the prompt tokens of the last 5 minutes was computed by "
            f"decode engines alone while a prefill engine had no request "
            f"({self.reasons(self.beside_idle)}): {what_to_do}"
        )


class PoolPrompts(msgspec.Struct, frozen=True):
    """How a pool's prompts of the last 5 minutes were served."""

    pool: str
    served: PromptShare


def _sum(one: dict[str, int], other: dict[str, int], sign: int = 1) -> dict[str, int]:
    found = Counter(one)
    for reason, tokens in other.items():
        found[reason] += sign * tokens
    return {reason: tokens for reason, tokens in found.items() if tokens}


class PromptShares:
    """Counts the prompts of one pool. `now`: monotonic seconds.

    Keeps a sum for each part of the window: of all that came before it. Nothing runs in between.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._sum = PromptShare()
        """Since the start."""
        self._parts: deque[tuple[float, PromptShare]] = deque()
        """When a part began, and the sum before it."""
        self._until = -math.inf
        """When the last part ends."""

    def add(self, tokens: int, times: LegTimes) -> None:
        """Count a prompt that was served."""
        now = self._now()
        if now >= self._until:
            self._begin_part(now)
        reason = times.why_alone
        if reason is None:
            self._sum.split += tokens
            return
        found = self._sum.alone
        if reason not in _CHOSEN and times.beside_idle:
            found = self._sum.beside_idle
            self._sum.prompts += 1
        found[reason] = found.get(reason, 0) + tokens

    def window(self) -> PromptShare:
        """Return what was counted in the last `WINDOW` seconds, and up to a part more."""
        now = self._now()
        if now >= self._until:
            self._begin_part(now)
        while self._parts[0][0] + PART <= now - WINDOW:
            self._parts.popleft()
        return self._sum.combined(self._parts[0][1], -1)

    def _begin_part(self, now: float) -> None:
        self._parts.append((now, self._sum.combined(PromptShare())))
        self._until = now + PART
        while self._parts[0][0] + PART <= now - WINDOW:
            self._parts.popleft()

    def samples(self) -> Samples:
        """Return the values of `PROMPT_TOKENS`."""
        found = dict.fromkeys(PROMPT_TOKENS.series, 0)
        found["split", "none"] = self._sum.split
        for served in ("alone", "beside_idle"):
            for reason, tokens in getattr(self._sum, served).items():
                found[served, reason] = tokens
        return found.items()
