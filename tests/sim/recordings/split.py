"""A prefill and a decode engine, and a recorded request to the second with the first one's
handle.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pdproxy_lab.sim.server import SimServer
from tests.sim.recordings.reading import Sent, prefills, read
from tests.sim.recordings.stage import PREFILL, Stage, count_tokens, other_prompt, words


@dataclass
class Pair:
    """A prefill and a decode engine between the two legs of an exchange."""

    stage: Stage
    p: SimServer
    d: SimServer
    sent: Sent
    """The request to D."""
    handle: dict[str, Any]


Act = Callable[[Pair], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class Split:
    """A recorded request to a decode engine, with the handle that the simulated P gives now."""

    policy: Literal["fail", "recompute"] = "fail"
    met: bool = True
    """Whether KV has moved between the two before."""
    other: int | None = None
    """P prefilled another prompt, of so many tokens."""
    apart: int | None = None
    """P prefilled another prompt, of so many tokens more than D's."""
    change: dict[str, Any] = field(default_factory=dict)
    """What is wrong with the handle; `...`: the key is missing."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What is special about both engines."""
    p_facts: dict[str, Any] = field(default_factory=dict)
    first: Act | None = None
    """What happens once the engines are up."""
    then: Act | None = None
    """What happens between P's answer and D's request."""
    after: Act | None = None
    """What must be so once D has answered."""
    says: Literal["right", "wrong"] | None = None
    """Whether D says what an engine alone would."""

    async def pair(self, stage: Stage, sent: Sent) -> Pair:
        """Bring a pair to the point where D is asked; `sent` is the recorded request to D."""
        p = await stage.engine("prefill", **self.facts, **self.p_facts)
        d = await stage.engine("decode", kv_load_failure_policy=self.policy, **self.facts)
        if self.met:
            await stage.meet(p, d)
        pair = Pair(stage, p, d, sent, {})
        if self.first is not None:
            await self.first(pair)
        pair.handle = await stage.prefill(p, self._to_prefill(sent))
        if self.then is not None:
            await self.then(pair)
        handle = {
            key: value for key, value in {**pair.handle, **self.change}.items() if value is not ...
        }
        pair.sent = sent.saying({**sent.json, "kv_transfer_params": handle})
        return pair

    def _to_prefill(self, sent: Sent) -> Sent:
        """The recorded request to P if there is one, else what a proxy would make of the one to
        D.
        """
        asked = sent.json
        if recorded := prefills().get(asked["kv_transfer_params"].get("remote_request_id")):
            return recorded
        prompt = {key: asked[key] for key in ("model", "prompt", "messages") if key in asked}
        if self.other is not None:
            prompt["prompt"] = other_prompt(self.other)
        if self.apart is not None:
            prompt["prompt"] = other_prompt(count_tokens(asked["prompt"]) + self.apart)
        return sent.saying(
            {**prompt, "temperature": 0, "max_tokens": 1, "kv_transfer_params": PREFILL}
        )

    async def __call__(self, stage: Stage, name: str) -> None:
        """Replay."""
        recorded = read(name)
        pair = await self.pair(stage, recorded.sent)
        answer = await stage.ask(pair.d, pair.sent)
        stage.compare(recorded, answer)
        if self.after is not None:
            await self.after(pair)
        if self.says is not None:
            assert (words(answer) == await stage.alone(recorded.sent, **self.facts)) is (
                self.says == "right"
            )
