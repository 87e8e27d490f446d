"""How each recording comes about: which engines it takes, and what befalls them before the recorded
request is sent.

A recording that no scene knows is a KeyError: none is left out in silence.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal

from tests.sim.raw import Raw, turns, until
from tests.sim.recordings import acts, connectors, pages, sequences, streams
from tests.sim.recordings.reading import read
from tests.sim.recordings.split import Pair, Split
from tests.sim.recordings.stage import ROOMY, Stage, seen, words

Scene = Callable[[Stage, str], Awaitable[None]]


async def _alone(
    stage: Stage, name: str, *, role: Literal["aggregated", "prefill", "decode"]
) -> None:
    await stage.replay(await stage.engine(role), read(name))


async def _prefill(stage: Stage, name: str) -> None:
    """P's leg. Where P had found tokens of the prompt in its cache, it has been asked before."""
    recorded, p = read(name), await stage.engine("prefill")
    answer = recorded.answer
    assert answer is not None
    if answer.status == 200 and not answer.streamed:
        handle = answer.json["kv_transfer_params"] or {}
        if handle.get("remote_prefill_cached_tokens"):
            body = {
                key: value
                for key, value in recorded.sent.json.items()
                if key != "kv_transfer_params"
            }
            await stage.ask(p, recorded.sent.saying(body))
    got = await stage.replay(p, recorded)
    if recorded.sent.json.get("echo"):
        assert got.json["choices"][0]["text"].startswith(recorded.sent.json["prompt"])


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
    pair = await Split(policy="recompute", then=acts.freeze).pair(stage, recorded.sent)
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
    **dict.fromkeys(pages.ROLES, pages.replay),
    "connector_notify_01": sequences.replay,
    "connector_example_01": connectors.shared,
    "connector_lmcache_01": connectors.lmcache(3, [], degraded=True),
    "connector_lmcache_03_cpu_shim_aligned": connectors.lmcache(3, ["rqa-1"]),
    "connector_lmcache_04_order": connectors.lmcache(1, []),
    # what P never saw, or saw otherwise
    "pd15_D_no_kv_params": partial(_alone, role="decode"),
    "pd23_D_n2": Split(),
    "pd25_D_two_prompts": Split(),
    "pd31_D_after_P_restart": Split(
        first=acts.restart, after=partial(acts.moved, met=True), says="right"
    ),
    "pd33_release_via_rejected_D_request": Split(other=274, after=acts.freed),
    "pd34_release_via_empty_blocks": Split(
        other=280, change={"remote_block_ids": [[]]}, after=acts.dead
    ),
    # P is gone
    "fail_P_killed_D_policy_fail_chat": Split(then=acts.kill),
    "fail_P_killed_D_policy_fail_chat_stream": Split(then=acts.kill),
    "fail_P_killed_D_policy_fail_completion": Split(then=acts.kill),
    "fail_P_killed_D_policy_fail_completion_stream": Split(then=acts.kill),
    "fail_P_killed_D_policy_recompute_completion": Split(
        then=acts.kill, policy="recompute", after=acts.recomputed, says="right"
    ),
    "fail_P_killed_D_policy_recompute_stream": Split(
        then=acts.kill, policy="recompute", after=acts.recomputed, says="right"
    ),
    "fail_P_restarted_old_params_D_policy_fail": Split(then=acts.restart),
    "fail_P_frozen_D_fail_no_handshake_yet": Split(then=acts.freeze, met=False),
    "fail_P_frozen_D_recompute_connected": _frozen_after_they_met,
    # the handle leads nowhere
    "fail_engine_id_mismatch_D_policy_fail": Split(change=_NOBODY),
    "fail_engine_id_mismatch_D_policy_recompute": Split(
        change=_NOBODY, policy="recompute", after=acts.recomputed, says="right"
    ),
    "fail_no_listener_D_policy_fail": _no_listener,
    "fail_missing_remote_request_id": _never_answered,
    # the handle is too old
    "fail_lease_expired_blocks_intact": Split(then=acts.expire, facts=ROOMY, says="right"),
    "fail_lease_expired_blocks_reused": Split(then=acts.reuse, p_facts=_SMALL, says="wrong"),
    # The recorded engine had nothing else to do: the freed blocks were intact, and its text was
    # right.
    "fail_params_reused": Split(then=acts.pulled_elsewhere, says="wrong"),
    # another prompt
    "fail_mismatch_D_longer": Split(apart=67 - 317, after=acts.dead),
    "fail_mismatch_D_shorter": Split(apart=271 - 70, says="wrong"),
    "fail_mismatch_Y_longer": Split(apart=66 - 199, first=acts.known_to_decode, says="wrong"),
    "fail_mismatch_Y_shorter": Split(apart=201 - 71, says="wrong"),
    "fail_mismatch_same_blocks": Split(apart=97 - 81, says="wrong"),
    "fail_mismatch_same_length": Split(apart=102 - 99, says="wrong"),
    "fail_two_prompts_second_longer": Split(policy="recompute", after=acts.dead),
    # D refuses
    "fail_D_400_with_kv_params": Split(after=acts.freed),
    "fail_D_400_pydantic_with_kv_params": Split(after=acts.still_held),
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
        return Split(met=False, after=acts.moved, says="right")
    raise KeyError(name)
