"""One prompt's dispatch to one pair of engines: what is taken and minted for it before its first leg.

Owns the leases of both engines until their legs end them, the room in the decode engine's receive buffer, and the wait for
notices. Every further try has a handover of its own; each is closed once, whatever became of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdproxy.kit.errors import EngineTimeoutError, Wait
from pdproxy.kit.ids import mint
from pdproxy.scheduling.ledger import Pair, Verdict
from pdproxy.serving.dispatch.resources import ExchangeResources
from pdproxy.serving.kv.buffers import BufferSpace
from pdproxy.serving.kv.custody import Custody
from pdproxy.serving.kv.orphans import PrefillLeg
from pdproxy.serving.kv.ready import Expected
from pdproxy.tokens.ids import TokenIds
from pdproxy.transfer.contract import NO_DISPATCH, Dispatch
from pdproxy.wire.request import Alone, Parsed, Prompt


def why_not(engines: ExchangeResources, parsed: Parsed, tokens: TokenIds | None) -> Alone | None:
    """Return why a prompt can't be handed over, as far as its tokens tell; None if nothing is against it."""
    if tokens is None:
        return Alone.NO_TOKENS
    if tokens.count < engines.transfer.contract.min_tokens(parsed):
        return Alone.SHORT_PROMPT
    buffers = engines.transfer.buffers
    return Alone.KV_BUFFER if buffers.bounded and not buffers.fits(tokens.count) else None


async def begin(
    engines: ExchangeResources, parsed: Parsed, prompt: Prompt, tokens: TokenIds | None, without: Sequence[str]
) -> Handover | None:
    """Lease a pair and take what its contract needs; wait for room in a receive buffer if need be. None: there is no pair.

    Raises:
        OverloadedError: no decode engine had room in time.
    """
    transfer = engines.transfer
    size = prompt.text_bytes or parsed.body_bytes
    slots: BufferSpace | None = None

    def choose(full: tuple[str, ...]) -> Pair | None:
        nonlocal slots
        pair = engines.ledger.pair(parsed.model, size, engines.now(), without=(*without, *full))
        if pair is not None and transfer.buffers.bounded:
            slots = transfer.buffers.take(pair.decode.node.url, count)
        return pair

    def possible() -> bool:
        pair = engines.ledger.pair(parsed.model, size, engines.now(), without=without)
        if pair is not None:
            engines.close(pair.prefill, Verdict.NEUTRAL)
            engines.close(pair.decode, Verdict.NEUTRAL)
        return pair is not None

    count = 0 if tokens is None else transfer.buffers.slots(tokens.count)
    pair = await transfer.buffers.when_room(count, choose, possible) if transfer.buffers.bounded else choose(())
    if pair is None:
        return None
    dispatch = NO_DISPATCH
    if transfer.contract.needs_leg_id:
        dispatch = Dispatch(mint(), tokens, receiver=engines.engines.known[pair.decode.node.url].receiver)
    elif tokens is not None:
        dispatch = Dispatch(ids=tokens)
    return Handover(engines, pair, dispatch, slots)


class PrefillFailedError(Exception):
    """There is no KV to decode from. `alone` is the reason if one engine must now do it; `another`: a pair may be left to try.

    `shun`: an engine that should not be asked next; None: the prefill engine.
    """

    def __init__(self, alone: Alone, *, another: bool, shun: str | None = None) -> None:
        super().__init__(alone.value)
        self.alone = alone
        self.another = another
        self.shun = shun


class Handover:
    """See the module. Made by `begin`."""

    __slots__ = ("_engines", "_expected", "_held", "_slots", "dispatch", "pair")

    def __init__(self, engines: ExchangeResources, pair: Pair, dispatch: Dispatch, slots: BufferSpace | None) -> None:
        self._engines = engines
        self._slots = slots
        self._expected: Expected | None = None
        self._held = False  # custody closes the wait
        self.pair = pair
        self.dispatch = dispatch
        contract = engines.transfer.contract
        if dispatch.leg_id is not None:
            ranks = 1 if contract.early else contract.notices(dispatch)
            if ranks != 0:
                self._expected = engines.transfer.ready.expect(dispatch.leg_id, ranks)

    def __repr__(self) -> str:
        return (
            f"<Handover {self.pair.prefill.node.url} -> {self.pair.decode.node.url}, {self._expected or 'no notices'}>"
        )

    @property
    def told(self) -> Expected | None:
        """The wait for a notice that may bring the handle before the answer, None if none may."""
        return self._expected if self._engines.transfer.contract.early else None

    def hand_on(self, leg: PrefillLeg) -> PrefillLeg:
        """Return the leg with the wait for notices and the room, which whoever adopts it ends: P may still push."""
        handed = replace(leg, expected=self._expected, slots=self._slots)
        self._expected = self._slots = None
        return handed

    async def kv_ready(self) -> None:
        """Wait until each rank has told that the KV is there. What if not is the operator's choice.

        Raises:
            EngineTimeoutError: they didn't, and the request is to fail then.
            PrefillFailedError: they didn't, and what was pushed so far must not be read: another decode engine computes it.
        """
        engines = self._engines
        if self._expected is None or engines.transfer.contract.early:
            return
        url, timeout = self.pair.prefill.node.url, engines.deadlines.kv_ready
        if await engines.transfer.ready.wait(self._expected, timeout, url):
            return
        if not engines.transfer.recomputes:
            raise EngineTimeoutError(f"{url} did not tell in {timeout:g} s that the KV is ready", wait=Wait.KV_READY)
        if engines.transfer.contract.pushes:
            raise PrefillFailedError(Alone.KV_LATE, another=False, shun=self.pair.decode.node.url)

    def in_custody(self, custody: Custody) -> None:
        """The KV is made: what room it takes is free again when its custody ends."""
        slots, self._slots = self._slots, None
        if slots is not None:
            custody.when_over(slots.give_back)
        if custody.state is not None:
            custody.expected = self._expected
            self._held = True

    def loaded(self) -> None:
        """The decode engine has shown data: the prompt's ids, which may be long, are not needed any more."""
        self.dispatch = NO_DISPATCH

    def close(self) -> None:
        """End the wait, give back the room, and the decode engine's lease where its leg hasn't. Closing twice changes nothing."""
        self._engines.close(self.pair.decode, Verdict.NEUTRAL)
        if self._expected is not None and not self._held:
            self._expected.close()
        if self._slots is not None:
            self._slots.give_back()
