"""How each recording comes about: which engines it takes, and what befalls them before the recorded request is sent.

A recording that no scene knows is a KeyError: none is left out in silence.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from pdproxy.sim.server import SimServer
from tests.sim.raw import Raw, turns, until
from tests.sim.recordings import pages, sequences, streams
from tests.sim.recordings.reading import Sent, prefills, read
from tests.sim.recordings.stage import PREFILL, ROOMY, Stage, count_tokens, other_prompt, seen, words

Scene = Callable[[Stage, str], Awaitable[None]]


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
        handle = {key: value for key, value in {**pair.handle, **self.change}.items() if value is not ...}
        pair.sent = sent.saying({**sent.json, "kv_transfer_params": handle})
        return pair

    def _to_prefill(self, sent: Sent) -> Sent:
        """The recorded request to P if there is one, else what a proxy would make of the one to D."""
        asked = sent.json
        if recorded := prefills().get(asked["kv_transfer_params"].get("remote_request_id")):
            return recorded
        prompt = {key: asked[key] for key in ("model", "prompt", "messages") if key in asked}
        if self.other is not None:
            prompt["prompt"] = other_prompt(self.other)
        if self.apart is not None:
            prompt["prompt"] = other_prompt(count_tokens(asked["prompt"]) + self.apart)
        return sent.saying({**prompt, "temperature": 0, "max_tokens": 1, "kv_transfer_params": PREFILL})

    async def __call__(self, stage: Stage, name: str) -> None:
        """Replay."""
        recorded = read(name)
        pair = await self.pair(stage, recorded.sent)
        answer = await stage.ask(pair.d, pair.sent)
        stage.compare(recorded, answer)
        if self.after is not None:
            await self.after(pair)
        if self.says is not None:
            assert (words(answer) == await stage.alone(recorded.sent, **self.facts)) is (self.says == "right")


async def _alone(stage: Stage, name: str, *, role: Literal["aggregated", "prefill", "decode"]) -> None:
    await stage.replay(await stage.engine(role), read(name))


async def _prefill(stage: Stage, name: str) -> None:
    """P's leg. Where P had found tokens of the prompt in its cache, it has been asked before."""
    recorded, p = read(name), await stage.engine("prefill")
    answer = recorded.answer
    assert answer is not None
    if answer.status == 200 and not answer.streamed:
        handle = answer.json["kv_transfer_params"] or {}
        if handle.get("remote_prefill_cached_tokens"):
            body = {key: value for key, value in recorded.sent.json.items() if key != "kv_transfer_params"}
            await stage.ask(p, recorded.sent.saying(body))
    got = await stage.replay(p, recorded)
    if recorded.sent.json.get("echo"):
        assert got.json["choices"][0]["text"].startswith(recorded.sent.json["prompt"])


# -- what befalls a pair


async def _kill(pair: Pair) -> None:
    await pair.p.kill()


async def _freeze(pair: Pair) -> None:
    await pair.p.freeze()


async def _restart(pair: Pair) -> None:
    await pair.p.restart()


async def _expire(pair: Pair) -> None:
    assert pair.p.engine.expire_leases() == 1


async def _reuse(pair: Pair) -> None:
    """The lease ends, and other prompts are computed where the KV was."""
    await _expire(pair)
    for start in (300, 301):
        body = {"prompt": list(range(start, start + 2000)), "max_tokens": 1}
        assert (await pair.stage.ask(pair.p, pair.sent.saying(body))).status == 200


async def _pulled_elsewhere(pair: Pair) -> None:
    """Another D has used the handle."""
    other = await pair.stage.engine("decode")
    sent = pair.sent.saying({**pair.sent.json, "kv_transfer_params": pair.handle})
    assert (await pair.stage.ask(other, sent)).status == 200
    await until(lambda: not pair.p.engine.handles)


async def _known_to_decode(pair: Pair) -> None:
    """D has the prompt in its own cache."""
    body = {key: value for key, value in pair.sent.json.items() if key != "kv_transfer_params"}
    assert (await pair.stage.ask(pair.d, pair.sent.saying(body))).status == 200


async def _freed(pair: Pair) -> None:
    await until(lambda: not pair.p.engine.handles)


async def _still_held(pair: Pair) -> None:
    await turns()
    assert len(pair.p.engine.handles) == 1


async def _dead(pair: Pair) -> None:
    assert pair.d.engine.dead
    assert (await pair.stage.ask(pair.d, Sent("GET", "/health"))).status == 503


# -- requests that are left waiting


async def _waiting(pair: Pair) -> Raw:
    """Ask D; return the connection once D waits for KV and has said nothing."""
    client = await Raw.connect(pair.d.port)
    client.send(pair.sent.raw)
    await until(lambda: pair.d.engine.stats.waiting == 1)
    await turns()
    assert not client.data
    assert not client.ended
    return client


async def _frozen_after_they_met(stage: Stage, name: str) -> None:
    """Nothing is heard of D until P goes on."""
    recorded = read(name)
    pair = await Split(policy="recompute", then=_freeze).pair(stage, recorded.sent)
    client = await _waiting(pair)
    await pair.p.thaw()
    answer = await client.whole()
    got = seen(answer)
    stage.compare(recorded, got)
    assert words(got) == await stage.alone(recorded.sent)


async def _never_answered(stage: Stage, name: str) -> None:
    """A key of the handle is missing: D waits for ever, and dies when the request is given up."""
    recorded = read(name)
    assert recorded.answer is None
    pair = await Split(change={"remote_request_id": ...}).pair(stage, recorded.sent)
    client = await _waiting(pair)
    client.leave()
    await until(lambda: pair.d.engine.dead)


async def _no_listener(stage: Stage, name: str) -> None:
    await Split(change={"remote_port": stage.closed_port()}, met=False)(stage, name)


_NOBODY = {"remote_engine_id": "00000000-0000-0000-0000-000000000000"}
_SMALL = {"num_gpu_blocks": 80}

_SCENES: dict[str, Scene] = {
    "agg_metrics": partial(pages.replay, role="aggregated"),
    "misc_metrics_P": partial(pages.replay, role="prefill"),
    "misc_metrics_D": partial(pages.replay, role="decode"),
    "connector_notify_01": sequences.replay,
    # what P never saw, or saw otherwise
    "pd15_D_no_kv_params": partial(_alone, role="decode"),
    "pd23_D_n2": Split(),
    "pd25_D_two_prompts": Split(),
    "pd31_D_after_P_restart": Split(first=_restart, says="right"),
    "pd33_release_via_rejected_D_request": Split(other=274, after=_freed),
    "pd34_release_via_empty_blocks": Split(other=280, change={"remote_block_ids": [[]]}, after=_dead),
    # P is gone
    "fail_P_killed_D_policy_fail_chat": Split(then=_kill),
    "fail_P_killed_D_policy_fail_chat_stream": Split(then=_kill),
    "fail_P_killed_D_policy_fail_completion": Split(then=_kill),
    "fail_P_killed_D_policy_fail_completion_stream": Split(then=_kill),
    "fail_P_killed_D_policy_recompute_completion": Split(then=_kill, policy="recompute", says="right"),
    "fail_P_killed_D_policy_recompute_stream": Split(then=_kill, policy="recompute", says="right"),
    "fail_P_restarted_old_params_D_policy_fail": Split(then=_restart),
    "fail_P_frozen_D_fail_no_handshake_yet": Split(then=_freeze, met=False),
    "fail_P_frozen_D_recompute_connected": _frozen_after_they_met,
    # the handle leads nowhere
    "fail_engine_id_mismatch_D_policy_fail": Split(change=_NOBODY),
    "fail_engine_id_mismatch_D_policy_recompute": Split(change=_NOBODY, policy="recompute", says="right"),
    "fail_no_listener_D_policy_fail": _no_listener,
    "fail_missing_remote_request_id": _never_answered,
    # the handle is too old
    "fail_lease_expired_blocks_intact": Split(then=_expire, facts=ROOMY, says="right"),
    "fail_lease_expired_blocks_reused": Split(then=_reuse, p_facts=_SMALL, says="wrong"),
    "fail_params_reused": Split(then=_pulled_elsewhere, says="right"),
    # another prompt
    "fail_mismatch_D_longer": Split(apart=67 - 317, after=_dead),
    "fail_mismatch_D_shorter": Split(apart=271 - 70, says="wrong"),
    "fail_mismatch_Y_longer": Split(apart=66 - 199, first=_known_to_decode, says="wrong"),
    "fail_mismatch_Y_shorter": Split(apart=201 - 71, says="wrong"),
    "fail_mismatch_same_blocks": Split(apart=97 - 81, says="wrong"),
    "fail_mismatch_same_length": Split(apart=102 - 99, says="wrong"),
    "fail_two_prompts_second_longer": Split(policy="recompute", after=_dead),
    # D refuses
    "fail_D_400_with_kv_params": Split(after=_freed),
    "fail_D_400_pydantic_with_kv_params": Split(after=_still_held),
    # D dies
    "fail_D_sigkill_midstream": streams.killed,
    "fail_D_sigterm_midstream": streams.terminated,
}


def scene_of(name: str) -> Scene:
    """Return how a recording is replayed.

    Raises:
        KeyError: nobody knows.
    """
    if name in _SCENES:
        return _SCENES[name]
    kind, _, rest = name.partition("_")
    if kind == "agg":
        return partial(_alone, role="aggregated")
    if kind in ("err", "misc"):
        return partial(_alone, role="prefill")
    if kind.startswith("pd") and rest.startswith("P_"):
        return _prefill
    if kind.startswith("pd") and rest.startswith(("D_", "from_", "warm_")):
        return Split(met=False, says="right")
    raise KeyError(name)
