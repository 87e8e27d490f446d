"""One prompt's dispatch to one pair of engines: what is taken and minted for it before its first leg.

Owns the leases of both engines until their legs end them, the room in the decode engine's receive buffer, and the wait for
notices. Every further try has a handover of its own; each is closed once, whatever became of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdproxy.kit.errors import EngineTimeoutError, Wait
from pdproxy.kit.ids import mint
from pdproxy.scheduling.ledger import Pair, Verdict
from pdproxy.serving.engines import Engines
from pdproxy.serving.ready import Expected
from pdproxy.serving.slots import Slots
from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.contract import NO_DISPATCH, Dispatch
from pdproxy.wire.request import Alone, Parsed, Prompt


def why_not(engines: Engines, tokens: TokenIds | None) -> Alone | None:
    """Return why a prompt can't be handed over, as far as its tokens tell; None if nothing is against it."""
    if tokens is None:
        return Alone.NO_TOKENS
    if tokens.count < (engines.transfer.contract.unit or 1):
        return Alone.SHORT_PROMPT
    buffers = engines.transfer.buffers
    return Alone.KV_BUFFER if buffers.bounded and not buffers.fits(tokens.count) else None


async def begin(
    engines: Engines, parsed: Parsed, prompt: Prompt, tokens: TokenIds | None, without: Sequence[str]
) -> Handover | None:
    """Lease a pair and take what its contract needs; wait for room in a receive buffer if need be. None: there is no pair.

    Raises:
        OverloadedError: no decode engine had room in time.
    """
    transfer = engines.transfer
    size = prompt.text_bytes or parsed.body_bytes
    slots: Slots | None = None

    def choose(full: tuple[str, ...]) -> Pair | None:
        nonlocal slots
        pair = engines.ledger.pair(parsed.model, size, engines.now(), without=(*without, *full))
        if pair is not None and transfer.buffers.bounded:
            slots = transfer.buffers.take(pair.decode.node.url, count)
        return pair

    count = 0 if tokens is None else transfer.buffers.slots(tokens.count)
    pair = await transfer.buffers.when_room(count, choose) if transfer.buffers.bounded else choose(())
    if pair is None:
        return None
    dispatch = NO_DISPATCH
    if transfer.contract.mints:
        dispatch = Dispatch(mint(), tokens, receiver=transfer.receivers.get(pair.decode.node.url))
    elif tokens is not None:
        dispatch = Dispatch(ids=tokens)
    return Handover(engines, pair, dispatch, slots)


class Handover:
    """See the module. Made by `begin`."""

    __slots__ = ("_engines", "_expected", "_slots", "dispatch", "pair")

    def __init__(self, engines: Engines, pair: Pair, dispatch: Dispatch, slots: Slots | None) -> None:
        self._engines = engines
        self._slots = slots
        self._expected: Expected | None = None
        self.pair = pair
        self.dispatch = dispatch
        contract = engines.transfer.contract
        if dispatch.leg_id is not None:
            ranks = 1 if contract.told is not None else contract.notices(dispatch)
            if ranks != 0:
                self._expected = engines.transfer.ready.expect(dispatch.leg_id, ranks)

    def __repr__(self) -> str:
        return (
            f"<Handover {self.pair.prefill.node.url} -> {self.pair.decode.node.url}, {self._expected or 'no notices'}>"
        )

    @property
    def told(self) -> Expected | None:
        """The wait for a notice that may bring the handle before the answer, None if none may."""
        return self._expected if self._engines.transfer.contract.told is not None else None

    async def kv_ready(self) -> None:
        """Wait until each rank has told that the KV is there. What if not is the operator's choice.

        Raises:
            EngineTimeoutError: they didn't, and the request is to fail then.
        """
        engines = self._engines
        if self._expected is None or engines.transfer.contract.told is not None:
            return
        url, timeout = self.pair.prefill.node.url, engines.deadlines.kv_ready
        if not await engines.transfer.ready.wait(self._expected, timeout, url) and not engines.transfer.recomputes:
            raise EngineTimeoutError(f"{url} did not tell in {timeout:g} s that the KV is ready", wait=Wait.KV_READY)

    def loaded(self) -> None:
        """The KV has left the receive buffer: the decode engine has shown data."""
        self.dispatch = NO_DISPATCH  # the ids may be as long as the prompt
        if self._slots is not None:
            self._slots.give_back()

    def close(self) -> None:
        """End the wait, give back the room, and the decode engine's lease where its leg hasn't. Closing twice changes nothing."""
        self._engines.close(self.pair.decode, Verdict.NEUTRAL)
        if self._expected is not None:
            self._expected.close()
        if self._slots is not None:
            self._slots.give_back()
