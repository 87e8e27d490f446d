"""What befalls a pair between its two legs, and what must be so after them."""

from tests.sim.raw import turns, until
from tests.sim.recordings.reading import Sent
from tests.sim.recordings.split import Pair
from tests.sim.recordings.stage import MEETING


async def kill(pair: Pair) -> None:
    await pair.p.kill()


async def freeze(pair: Pair) -> None:
    await pair.p.freeze()


async def restart(pair: Pair) -> None:
    await pair.p.restart()


async def expire(pair: Pair) -> None:
    assert pair.p.engine.expire_leases() == 1


async def reuse(pair: Pair) -> None:
    """The lease ends, and other prompts are computed where the KV was."""
    await expire(pair)
    for start in (400, 401):
        body = {"prompt": list(range(start, start + 2000)), "max_tokens": 1}
        assert (await pair.stage.ask(pair.p, pair.sent.saying(body))).status == 200


async def pulled_elsewhere(pair: Pair) -> None:
    """Another D has used the handle."""
    other = await pair.stage.engine("decode")
    sent = pair.sent.saying({**pair.sent.json, "kv_transfer_params": pair.handle})
    assert (await pair.stage.ask(other, sent)).status == 200
    await until(lambda: not pair.p.engine.handles)


async def known_to_decode(pair: Pair) -> None:
    """D has the prompt in its own cache."""
    body = {key: value for key, value in pair.sent.json.items() if key != "kv_transfer_params"}
    assert (await pair.stage.ask(pair.d, pair.sent.saying(body))).status == 200


def _pulled(pair: Pair, *, met: bool) -> int:
    """How many prompt tokens D got from P for the recorded request."""
    return pair.d.engine.stats.prompt_tokens_by_source["external_kv_transfer"] - (
        MEETING if met else 0
    )


async def moved(pair: Pair, *, met: bool = False) -> None:
    """All of the prompt's KV came from P, which is free now."""
    assert _pulled(pair, met=met) == pair.handle["remote_num_tokens"]
    await freed(pair)


async def recomputed(pair: Pair) -> None:
    """None of the prompt's KV came from P."""
    assert not _pulled(pair, met=True)


async def freed(pair: Pair) -> None:
    await until(lambda: not pair.p.engine.handles)


async def still_held(pair: Pair) -> None:
    await turns()
    assert len(pair.p.engine.handles) == 1


async def dead(pair: Pair) -> None:
    assert pair.d.engine.dead
    assert (await pair.stage.ask(pair.d, Sent("GET", "/health"))).status == 503
