"""The encoder stage: encoder engines encode the media of a prompt before the engine that computes
the prompt (the consumer) is asked.

Owns the stage, its legs and their leases. Each medium goes to the engine that has probably encoded
that medium before, as far as load allows (policy `session`). The media of one engine make one leg,
and all legs run at once. The media of a leg that fails go to another engine, once, if the request
has or gets a place among those that are tried again (`retry_budget`). No failure here fails the
request: the consumer encodes what was not encoded in time, unless its connector can't.
Then an engine without encoders serves the request.

Outputs are not in the proxy's custody: engines drop the oldest ones by themselves.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from pdproxy.kit.errors import (
    EngineError,
    OverloadedError,
    RefusalReason,
    StaleConnectionError,
    Wait,
)
from pdproxy.kit.frames import drop_traceback
from pdproxy.kit.ids import mint
from pdproxy.observe.events import DeadlinePassed, MediaEncoded
from pdproxy.scheduling.leases import FAILED, GOOD, NEUTRAL, Lease
from pdproxy.scheduling.ledger_engine import DECODE
from pdproxy.scheduling.losses import Slot
from pdproxy.scheduling.policy import Ask
from pdproxy.serving.dispatch.attempt import Attempt
from pdproxy.serving.dispatch.failure_class import (
    is_clients_fault,
    is_doubtful,
    refused,
    verdict_of,
)
from pdproxy.serving.dispatch.prompt_request import PromptRequest
from pdproxy.serving.dispatch.recovery import CannotSplit, Failed
from pdproxy.transfer import encoders
from pdproxy.transfer.encoders import EncodedMedia, Output
from pdproxy.upstream.client import Answer, Pending
from pdproxy.upstream.connection import Message
from pdproxy.wire.route import Route
from pdproxy.wire.route_form import Alone, Medium

TRIES = 2
"""Engines that may be asked for one medium."""
_MAX_ANSWER = 256 << 10
"""Bytes of an encoder engine's answer: some hundred for each medium, and of a video a number for
each frame. The event loop reads it at once.
"""
_ENCODED, _REFUSED, _FAILED, _LATE, _NO_ENGINE = "encoded", "refused", "failed", "late", "no_engine"


async def encode_media(
    request: PromptRequest, attempt: Attempt, media: Sequence[Medium]
) -> CannotSplit | Failed | None:
    """Have a prompt's media encoded for an attempt, if the pool has encoder engines. Return why the
    engines of the attempt can't serve the prompt, None if they can.
    """
    resources, consumer = request.resources, attempt.assignment.leases[0].engine
    if not resources.states.has_encoders:
        return None
    done, contract = request.encoded, resources.encoders
    if done is not None:  # by an attempt before: the report has what all of them took
        request.tried.encode_s, request.tried.encoders = done.seconds, done.encoders
    if consumer.role is DECODE:
        return None
    if done is None or contract.pushes:  # what was pushed is of use to one attempt
        try:
            done = await EncoderStage(request, media, consumer.url).run()
        except OverloadedError as error:  # no other engine is risked
            return Failed(error)
        request.encoded = done
        request.tried.encode_s, request.tried.encoders = done.seconds, done.encoders
    if contract.pushes and done.missing:
        # it would wait for the output, and fail
        if attempt.prefill_url is not None:
            return CannotSplit(Alone.NOT_ENCODED, exclude=consumer.url)
        text = "no encoder engine can encode the media of this request: see /ready"
        return Failed(OverloadedError(text, RefusalReason.NO_ENGINE))
    attempt.told = contract.tells(done.outputs, done.ids)
    return None


class EncoderStage:
    """The stage of one prompt. Run once. `consumer`: the URL of the engine that uses the
    outputs.
    """

    __slots__ = (
        "_address",
        "_encoders",
        "_ids",
        "_media",
        "_outputs",
        "_request",
        "_resources",
        "_results",
        "_slot",
        "_without",
    )

    def __init__(self, request: PromptRequest, media: Sequence[Medium], consumer: str) -> None:
        resources = self._resources = request.resources
        self._request = request
        self._media = media
        pushes = resources.encoders.pushes
        self._address = resources.engines.known[consumer].ec_address if pushes else ""
        """Where the consumer receives outputs, None if that is not known; "" where it reads
        them.
        """
        self._ids = [mint() for _ in media] if pushes else []
        self._outputs: list[tuple[int, Output]] = []
        """With the places of their media."""
        self._encoders: list[tuple[str, float]] = []
        """Engines that have answered, with their seconds."""
        self._slot: Slot | None = None
        """The place of its second round, None where the request has one of its own."""
        self._results = [_NO_ENGINE] * len(media)
        self._without: Sequence[str] = resources.states.other_encoders(consumer)

    async def run(self) -> EncodedMedia:
        """Have the media encoded, as far as engines can, in time.

        Raises:
            EnginesLostError: engines were lost under the request, and no other one is risked.
        """
        resources, before = self._resources, self._request.encoded
        began = resources.now()
        if self._request.headers.lost:
            lost = await resources.lost.forbidden(self._request.headers)
            self._without = (*self._without, *lost)
        places = list(range(len(self._media)))
        every: list[EncodeLeg] = []
        try:
            with resources.clock.within(resources.deadlines.encode):
                for number in range(TRIES):
                    if number and not await self._may_retry():
                        break
                    legs = await self._legs(places, is_last=number + 1 == TRIES)
                    if not legs:
                        break
                    every += legs
                    await self._run(legs)
                    places = [at for at in places if self._results[at] == _FAILED]
                    if not places:
                        break
                    await self._judge()
        except TimeoutError:
            resources.observers.notify(DeadlinePassed(Wait.ENCODE.value))
            for leg in every:
                leg.late()
        finally:
            for leg in every:
                leg.close()  # one that did not begin has leases, too
            if self._slot is not None:
                self._request.leave_slot()
        for result, count in Counter(self._results).items():
            resources.observers.notify(MediaEncoded(result, count))
        self._outputs.sort(key=lambda one: one[0])
        return EncodedMedia(
            tuple(output for _, output in self._outputs),
            tuple(self._ids),
            sum(result != _ENCODED for result in self._results),
            resources.now() - began + (0.0 if before is None else before.seconds),
            (*(() if before is None else before.encoders), *self._encoders),
        )

    async def _may_retry(self) -> bool:
        """Wait for a place among requests that are tried again, unless the request has one. Return
        whether it has one.
        """
        request = self._request
        if request.slot is None:
            request.slot = self._slot = await self._resources.retry_slot(request.headers)
        return request.slot is not None

    async def _legs(self, places: Sequence[int], *, is_last: bool) -> list[EncodeLeg]:
        """Lease an engine for each of some media, and return a leg for each engine."""
        if self._address is None:
            return []
        request, resources = self._request, self._resources
        model, now = request.parsed.model, resources.now()
        media = [self._media[at] for at in places]
        asks = [Ask(model, one.size, now, session=one.key) for one in media]
        proven = not resources.encoders.pushes
        found = await resources.scheduler.choose_encoders(asks, self._without, proven=proven)
        leases: dict[str, list[tuple[int, Lease]]] = {}
        for at, lease in zip(places, found, strict=False):
            leases.setdefault(lease.engine.url, []).append((at, lease))
        return [EncodeLeg(request, self, given, is_last=is_last) for given in leases.values()]

    async def _run(self, legs: Sequence[EncodeLeg]) -> None:
        # A task group that is cancelled leaves its request in a reference cycle.
        if len(legs) == 1:
            await legs[0].run()
            return
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(leg.run(), name="encode media") for leg in legs]
        try:
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
        for task in tasks:
            task.result()

    async def _judge(self) -> None:
        """Look whether engines are lost under the request.

        Raises:
            EnginesLostError: no other engine is risked.
        """
        request = self._request
        if request.headers.lost:
            request.note_fingerprint()
            error = await self._resources.lost.judge(request.headers, request.fingerprint)
            if error is not None:
                raise error

    def message(self, places: Sequence[int]) -> tuple[bytes, str]:
        """Return the body of a leg for some media, and its path."""
        contract = self._resources.encoders
        ids = [self._ids[at] for at in places] if contract.pushes else []
        params = contract.asks(ids, self._address or "")
        media = [self._media[at] for at in places]
        return encoders.body(self._request.parsed, media, params), Route.CHAT.form.path

    def ended(self, places: Sequence[int], result: str, outputs: Sequence[Output] = ()) -> None:
        """Note what has become of some media."""
        for at in places:
            self._results[at] = result
        # those that are more than the media belong to the last one
        self._outputs += [
            (places[min(number, len(places) - 1)], one) for number, one in enumerate(outputs)
        ]

    def answered(self, url: str, seconds: float) -> None:
        """Note how long an engine took."""
        self._encoders.append((url, seconds))

    def avoid(self, url: str) -> None:
        """Ask an engine no more."""
        self._without = (*self._without, url)


class EncodeLeg:
    """A leg to one encoder engine. Run once. The watch over engines that stand still sees it as a
    `fleet.open_legs.OpenLeg`.

    `given`: the places of its media in the prompt, with their leases.
    """

    __slots__ = (
        "_engine",
        "_is_last",
        "_leases",
        "_pending",
        "_places",
        "_request",
        "_stage",
        "_url",
        "_verdict",
        "prompt_bytes",
        "since",
        "stalled_before",
    )
    phase = "encode"
    in_silence = False
    is_counted = must_progress = True
    waits_for = None

    def __init__(
        self,
        request: PromptRequest,
        stage: EncoderStage,
        given: Sequence[tuple[int, Lease]],
        *,
        is_last: bool,
    ) -> None:
        self._request, self._stage, self._is_last = request, stage, is_last
        self._places = [at for at, _ in given]
        self._leases = [lease for _, lease in given]
        self._url = self._leases[0].engine.url
        self._engine = request.resources.engines.known[self._url]
        self._pending: Pending | None = None
        self._verdict = NEUTRAL
        self.prompt_bytes = sum(lease.prompt_bytes for lease in self._leases)
        self.since = 0.0
        self.stalled_before = request.stalled

    def __repr__(self) -> str:
        return f"<EncodeLeg {self._url}, {len(self._places)} media>"

    async def run(self) -> None:
        """Have the engine encode the media, tell the stage what came of it, and close."""
        resources, request = self._request.resources, self._request
        self.since = resources.now()
        self._engine.open_legs.add(self)
        self._stage.ended(self._places, _LATE)
        try:
            self._pending = await self._engine.client.ask(self._message, max_bytes=_MAX_ANSWER)
            self._read(await self._pending.answered())
            self._stage.answered(self._url, resources.now() - self.since)
        except EngineError as error:
            lease = self._leases[0]
            request.broke(lease, error)
            self._verdict = verdict_of(error)
            if is_doubtful(error):
                request.in_doubt().encode_failed(lease)
            if not isinstance(error, StaleConnectionError):
                self._stage.avoid(self._url)
            self._stage.ended(self._places, _FAILED)
            resources.report_failure(
                request.headers, self._url, "encode", error, will_retry=not self._is_last
            )
            drop_traceback(error)
        self.close()  # one that is cancelled is closed by its stage, which knows why

    def late(self) -> None:
        """Its deadline is over. One that came second has had only a part of the time."""
        if not self._is_last:
            self._verdict = FAILED

    def close(self) -> None:
        """End the leg: an engine that is still at work stops. Closing twice changes nothing."""
        leases, self._leases = self._leases, []
        if not leases:
            return
        resources = self._request.resources
        is_good = self._verdict is GOOD
        self._engine.open_legs.remove(self, ended_well=resources.now() if is_good else None)
        if self._pending is not None:
            self._pending.close()
        first, *others = leases
        resources.close(first, self._verdict)
        for lease in others:  # one leg shows one thing of its engine
            resources.close(lease, NEUTRAL)

    def _message(self) -> Message:
        body, path = self._stage.message(self._places)
        headers = self._request.headers.named(mint())
        return self._engine.client.request(path, headers, body)

    def _read(self, answer: Answer) -> None:
        if answer.status != 200:
            if not is_clients_fault(answer):
                raise refused(self._url, answer)
            # the consumer's own refusal is the client's answer
            self._verdict = GOOD
            self._stage.ended(self._places, _REFUSED)
            return
        outputs = encoders.outputs_in(answer.body, len(self._places))
        hosts = self._request.resources.transfer.hosts
        if not isinstance(outputs, str):
            named = {one.host for one in outputs if one.host is not None}
            whys = (hosts.why_not(host, self._url) for host in named)
            outputs = next((why for why in whys if why is not None), outputs)
        if isinstance(outputs, str):
            raise EngineError(f"{self._url} encoded nothing that can be used: {outputs}")
        self._verdict = GOOD
        if self._request.resources.encoders.pushes and len(outputs) != len(self._places):
            # A video with sound has two outputs, but the transfer ids are one for each medium. The
            # engine has not failed.
            self._stage.ended(self._places, _REFUSED)
            return
        self._stage.ended(self._places, _ENCODED, outputs)

    # -- as an open leg of its engine

    def last_sign(self) -> float:
        """Return that none has come: it shows nothing before its whole answer."""
        return 0.0

    def source_lost(self, why: str) -> None:
        """It waits for no KV."""

    def fail(self, error: EngineError) -> None:
        """End it: its engine stands still."""
        if self._pending is not None:
            self._pending.fail(error)
