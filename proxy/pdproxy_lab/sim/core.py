"""The engine's core: continuous batching over queues and KV blocks, one step after the other. Pure:
time is passed in.

Owns the queues, the requests in them and their blocks. A driver calls `begin`, waits for the step's
seconds, calls `finish` and delivers the outputs; commands to other engines and the proxy are in
`commands`. The same core runs behind HTTP in real time and without it in virtual time. Scheduling
follows vLLM's v1 scheduler: running requests first, then waiting ones, a token budget per step,
prompts in chunks, and the youngest request is preempted when blocks run out.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from pdproxy_lab.sim.active import ActiveRequest, RequestState, Step, step_of
from pdproxy_lab.sim.connector import KvLoad
from pdproxy_lab.sim.connectors import connector_of, ec_connector_of
from pdproxy_lab.sim.ec_connector import OutputStorage
from pdproxy_lab.sim.encoder import Encoder
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.kv_event_log import log_of
from pdproxy_lab.sim.language import Language, mix
from pdproxy_lab.sim.memory import Attention, BlockPool, Page, block_keys
from pdproxy_lab.sim.nixl import Greeting, Nixl, SideChannelPeer
from pdproxy_lab.sim.request import EngineDeadError, EngineOutput, EngineRequest, Token
from pdproxy_lab.sim.stats import Stats
from pdproxy_lab.sim.storage import MemoryStorage, Storage
from pdproxy_lab.sim.tokenizer import EOS
from pdproxy_lab.sim.waiting import WaitingRequests, fits_whole


class Core:
    """One engine core. After an `EngineDeadError` it must not be used again."""

    def __init__(
        self,
        facts: SimFacts,
        engine_id: str,
        side_channel_port: int,
        chance: random.Random,
        stats: Stats,
        storage: Storage | None = None,
        agent: str = "",
        outputs: OutputStorage | None = None,
    ) -> None:
        self.facts, self.stats, self.engine_id, self.agent = facts, stats, engine_id, agent
        self.pool = BlockPool(facts.num_gpu_blocks, facts.block_size)
        self.kv_events = log_of(facts, self.pool)
        self.connector = connector_of(
            facts,
            engine_id,
            side_channel_port,
            self.pool,
            stats,
            MemoryStorage() if storage is None else storage,
        )
        self.ec_connector = ec_connector_of(facts, stats, outputs, self.connector.outbox)
        self._encoder = Encoder(stats, self.ec_connector)
        self._language = Language(facts.eos_every, thinks=facts.reasoning_parser != "none")
        self._seed = mix(crc32(facts.model.encode()), facts.weights)
        self._chance = chance
        self._sequences: dict[str, ActiveRequest] = {}
        self._waiting = WaitingRequests()
        self._running: list[ActiveRequest] = []
        self._loads: dict[str, ActiveRequest] = {}
        self._outputs: list[EngineOutput] = []
        self._pulls: list[int] = []  # tokens of the KV transfers that the next step begins

    # -- requests

    def add(self, request: EngineRequest, now: float) -> None:
        """Queue a request."""
        sampling, params, chance = request.sampling, request.kv_transfer_params, None
        if sampling.temperature > 0:
            seed = None if sampling.seed == -1 else sampling.seed  # as vLLM takes it
            chance = random.Random(self._chance.getrandbits(64) if seed is None else mix(seed, 3))
        sequence = ActiveRequest(
            request=request,
            attention=Attention(self.pool, self._seed),
            arrived=now,
            tokens=list(request.prompt),
            salt=crc32((request.cache_salt or "").encode()),
            thoughts=self._language.thoughts_begun(request.prompt),
            params=dict(params) if params is not None and self.facts.connector != "none" else None,
            chance=chance,
            ec_params=dict(request.ec_transfer_params or {}),
        )
        self._sequences[request.id] = sequence
        self._waiting.add(sequence)
        self.connector.queued(sequence)
        self._update_gauges()

    def abort(self, request_id: str, now: float) -> None:
        """End a request that is no longer needed. An unknown id is ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        lost = sequence.never_loads and self.connector.lost_loads_kill
        if lost and not (sequence.params or {}).get("do_remote_decode"):
            raise EngineDeadError
        self._break_off(sequence, "abort", now)

    def _break_off(self, sequence: ActiveRequest, reason: str, now: float) -> None:
        before = sequence.state
        self._end(sequence, reason, now)
        if before is RequestState.WAITING and not sequence.scheduled_before:
            self.connector.dropped(sequence.request.id, sequence.params)

    def _fail(self, sequence: ActiveRequest, now: float) -> None:
        """End a request with an error."""
        self._break_off(sequence, "error", now)
        self._outputs.append(EngineOutput(request_id=sequence.request.id, finish_reason="error"))

    def reject(self, params: dict[str, Any]) -> None:
        """Clean up after a request that the API server refused."""
        self.connector.dropped("", dict(params))

    # -- steps

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        if self.connector.blocked:
            return False
        return bool(
            self._running
            or self._waiting
            or self._outputs
            or (self._loads and self.connector.waits_for_step)
        )

    def begin(self, now: float) -> Step | None:
        """Return the next step; None: nothing can be computed."""
        self.connector.tick(now)
        self.ec_connector.tick(now)
        if self.connector.blocked:
            return None
        if self.busy or self._loads:
            self.connector.flush()
        budget = self.facts.max_num_batched_tokens
        work: list[tuple[ActiveRequest, int]] = []
        preempted = False
        place = 0
        while place < len(self._running) and budget:
            sequence = self._running[place]
            count = min(len(sequence.tokens) - sequence.computed, budget)
            while not self._grow(sequence, sequence.computed + count):
                preempted = True
                if self._preempt(work) is sequence:
                    count = 0
                    break
            if not count:
                break
            work.append((sequence, count))
            budget -= count
            place += 1
        if not preempted and not self._schedule_waiting(work, budget, now):
            return None
        self._fail_unavailable(now)
        self._update_gauges()
        pulls, self._pulls = self._pulls, []
        step = step_of(work, pulls, self.facts.hardware)
        return step if work or self._outputs or step.seconds else None

    def finish(self, step: Step, now: float) -> list[EngineOutput]:
        """Return the outputs of a step, after its time has passed."""
        for sequence, count in step.work:
            if sequence.state is RequestState.RUNNING:
                self._compute(sequence, count, now)
        self._update_gauges()
        if self.connector.blocked:  # a step ends only when its KV is saved
            return []
        outputs, self._outputs = self._outputs, []
        return outputs

    def _schedule_waiting(
        self, work: list[tuple[ActiveRequest, int]], budget: int, now: float
    ) -> bool:
        """Add the requests that may begin. Return False if the whole engine has to wait for one's
        KV.
        """
        try:
            return self._schedule_ready(work, budget, now)
        finally:
            self._waiting.unskip()

    def _schedule_ready(
        self, work: list[tuple[ActiveRequest, int]], budget: int, now: float
    ) -> bool:
        while self._waiting and budget and len(self._running) < self.facts.max_num_seqs:
            sequence = self._waiting.first
            wanted, later = 0, False
            if not (
                had_blocks := bool(sequence.blocks)
            ):  # otherwise its KV has just been loaded, or the load has failed
                wanted, later = self._match(sequence)
                if self.connector.blocked:
                    self._unmatch(sequence)
                    return False
                if sequence.request.id in self.connector.broken:
                    self._read_failed(sequence, now)
                    continue
            if not self.ec_connector.ready(
                sequence, sequence.computed + wanted, self._encoder.outputs, now
            ):
                if not had_blocks:
                    self._unmatch(sequence)
                self._waiting.skip(sequence)
                continue
            known = sequence.computed + wanted
            count = min(len(sequence.tokens) - known, budget)
            upto = known if later else known + count
            if not fits_whole(
                sequence, self._running if later else (), self.pool
            ) or not self._grow(sequence, upto):
                if not had_blocks:
                    self._unmatch(sequence)
                break
            self._waiting.remove(sequence)
            first = not sequence.scheduled_before
            sequence.scheduled_before = True
            if first:
                sequence.count_start(self.stats, sequence.prompt - sequence.local, wanted, now)
            new = len(sequence.blocks) - sequence.local // self.facts.block_size
            if first and not self.connector.allocated(sequence, new if wanted else 0, wanted):
                sequence.never_loads = wanted > 0
            if later:
                sequence.state = RequestState.LOADING
                self._loads[sequence.request.id] = sequence
                if self.connector.pulls_in_step:
                    self._pulls.append(wanted)
                continue
            if wanted:
                self.connector.load(sequence, wanted)
                sequence.external, sequence.computed = wanted, known
                self._remember(sequence)
            sequence.state = RequestState.RUNNING
            self._running.append(sequence)
            work.append((sequence, count))
            budget -= count
        return True

    def _fail_unavailable(self, now: float) -> None:
        """Fail the requests whose encoder outputs can't come."""
        unavailable, found = self.ec_connector.unavailable, self._sequences
        failing = [found[name] for name in sorted(unavailable) if name in found]
        unavailable.clear()
        for sequence in failing:
            self._fail(sequence, now)

    def _match(self, sequence: ActiveRequest) -> tuple[int, bool]:
        """Look for the prompt's KV here, then elsewhere. Return how many tokens come from
        elsewhere, and whether later.
        """
        facts = self.facts
        sequence.attention.reset()
        # vLLM's skip_reading_prefix_cache
        computes_all = sequence.request.sampling.prompt_logprobs is not None
        if facts.enable_prefix_caching and not computes_all:
            block_keys(sequence.keys, sequence.keyed, facts.block_size, sequence.salt)
            limit = (len(sequence.tokens) - 1) // facts.block_size
            found = self.pool.find(sequence.keys, limit)
            self.pool.hold(found)
            self.kv_events.reused(sequence, len(found))
            sequence.blocks = found
            sequence.computed = sequence.local = len(found) * facts.block_size
            sequence.remembered = len(found)
        return (
            (0, False)
            if sequence.scheduled_before or computes_all
            else self.connector.wanted(sequence)
        )

    def _unmatch(self, sequence: ActiveRequest) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.local = sequence.remembered = 0

    def _grow(self, sequence: ActiveRequest, upto: int) -> bool:
        if self.facts.encodes_only:
            return True
        missing = -(-upto // self.facts.block_size) - len(sequence.blocks)
        if missing > self.pool.available:
            return False
        if missing > 0:
            sequence.blocks += self.pool.take(missing)
        return True

    def _preempt(self, work: list[tuple[ActiveRequest, int]]) -> ActiveRequest:
        """Preempt the youngest request: it will compute everything again."""
        victim = self._running.pop()
        work[:] = [(sequence, count) for sequence, count in work if sequence is not victim]
        self._unmatch(victim)
        victim.state = RequestState.WAITING
        self._waiting.put_back(victim)
        self.stats.preemptions += 1
        return victim

    # -- computing

    def _compute(self, sequence: ActiveRequest, count: int, now: float) -> None:
        start, end = sequence.computed, sequence.computed + count
        if self._encoder.refuses(sequence, start, end):
            self._fail(sequence, now)
            return
        if self.facts.encodes_only:
            self._encode(sequence, start, end, now)
            return
        seen = self._encoder.seen(sequence, start, end)
        state = sequence.attention.write(sequence.blocks, seen, start, end)
        sequence.computed = end
        self._remember(sequence)
        self.connector.stepped(sequence, first=not sequence.begun, now=now)
        sequence.begun = True
        if end < len(sequence.tokens):
            return
        first = not sequence.generated
        draw = sequence.chance.getrandbits(64) if sequence.chance is not None else 0
        recent = sequence.tokens[-3:]
        language = self._language.behind(sequence.thoughts)
        token = language.next_token(
            state, sequence.generated, sequence.request.sampling, draw, recent
        )
        sequence.append(token.id)
        sequence.count_output(self.stats, now)
        self._emit(sequence, token, first, now)

    def _encode(self, sequence: ActiveRequest, start: int, end: int, now: float) -> None:
        """Encode what a part of a prompt has. Behind its end, the request is over: nothing is
        generated.
        """
        self._encoder.run(sequence, start, end)
        sequence.computed = end
        if end < len(sequence.tokens):
            return
        sequence.count_output(self.stats, now, tokens=0)
        output = EngineOutput(request_id=sequence.request.id, finish_reason="stop")
        self._outputs.append(output)
        self._end(sequence, "stop", now, output)

    def _remember(self, sequence: ActiveRequest) -> None:
        """Put the blocks that are full now into the prefix cache."""
        full = sequence.computed // self.facts.block_size
        if full <= sequence.remembered or not self.facts.enable_prefix_caching:
            return
        block_keys(sequence.keys, sequence.keyed, self.facts.block_size, sequence.salt)
        self.pool.remember(
            sequence.blocks[sequence.remembered : full], sequence.keys[sequence.remembered : full]
        )
        self.kv_events.stored(sequence, sequence.remembered, full)
        sequence.remembered = full

    def _emit(self, sequence: ActiveRequest, token: Token, first: bool, now: float) -> None:
        request, sampling = sequence.request, sequence.request.sampling
        if first:  # of the prefill: what the answer adds to a block of the prompt counts no more
            in_cache = min(sequence.remembered * self.facts.block_size, sequence.prompt)
            sequence.created = max(in_cache - sequence.local - sequence.external, 0)
        output = EngineOutput(
            request_id=request.id,
            tokens=(token,),
            num_cached_tokens=sequence.cached_tokens,
            num_cache_creation_tokens=sequence.created,
        )
        if first and sampling.prompt_logprobs is not None:
            output.prompt_logprobs = self._language.prompt_scores(
                self._seed, request.prompt, sampling.prompt_logprobs
            )
        made = len(sequence.generated)
        if made >= sampling.min_tokens and token.id == EOS and not sampling.ignore_eos:
            output.finish_reason = "stop"
        elif made >= sampling.min_tokens and token.id in sampling.stop_token_ids:
            output.finish_reason, output.stop_reason = "stop", token.id
        elif made >= sampling.max_tokens or len(sequence.tokens) >= self.facts.max_model_len:
            output.finish_reason = "length"
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._end(sequence, output.finish_reason, now, output)

    def _end(
        self,
        sequence: ActiveRequest,
        reason: str,
        now: float,
        output: EngineOutput | None = None,
    ) -> None:
        """Remove a request; its last output gets what the connectors tell others."""
        before, sequence.state = sequence.state, RequestState.ENDED
        self._sequences.pop(sequence.request.id, None)
        self.stats.finished[reason] += 1
        self.stats.e2e.observe(now - sequence.arrived)
        self.connector.arrived(sequence.request.id)
        if before is RequestState.RUNNING:
            self._running.remove(sequence)
        elif before is RequestState.WAITING:
            self._waiting.remove(sequence)
        elif self.connector.keeps_aborted_loads and sequence.request.id in self._loads:
            self.ec_connector.ended(sequence, now)
            return  # LOADING: its blocks are freed after the transfer
        else:
            self._loads.pop(sequence.request.id, None)
        kept, params = self.connector.ended(sequence, reason, now)
        if not kept:
            self.pool.release(sequence.blocks)
            sequence.blocks = []
        told = self.ec_connector.ended(sequence, now)
        if output is not None:
            output.kv_transfer_params, output.ec_transfer_params = params, told

    # -- KV from elsewhere

    def loaded(self, pull: KvLoad, pages: Sequence[Page]) -> None:
        """Store the pages that came for a request; P may free them."""
        sequence = self._loads.pop(pull.request_id)
        self.connector.loaded(pull)
        for block, page in zip(sequence.blocks[-len(pages) :], pages, strict=True):
            self.pool.pages[block] = page
        self._arrived(sequence, pull.request_id, pull.tokens, sequence.local + pull.tokens)

    def _arrived(
        self, sequence: ActiveRequest, request_id: str, tokens: int, computed: int
    ) -> None:
        self.connector.arrived(request_id)
        if sequence.state is RequestState.ENDED:
            self.pool.release(sequence.blocks)
            return
        sequence.external, sequence.computed = tokens, computed
        self._remember(sequence)
        # The last token is computed again, for its output.
        sequence.computed -= sequence.computed == len(sequence.tokens)
        sequence.state = RequestState.WAITING
        self._waiting.put_back(sequence)

    def received(self, request_id: str, pages: Sequence[Page], tokens: int) -> None:
        """Store whole blocks that were pushed for a waiting request. A request that has ended is
        ignored.
        """
        if (sequence := self._loads.get(request_id)) is None:
            return
        for block, page in zip(sequence.blocks[-len(pages) :], pages, strict=True):
            self.pool.pages[block] = page
        self._arrived(self._loads.pop(request_id), request_id, tokens, sequence.computed + tokens)

    def load_failed(self, request_id: str, now: float) -> None:
        """A request's KV can't be had, and a transfer of its own has failed."""
        self.stats.failed_transfers += 1
        self.never_received(request_id, now)

    def never_received(self, request_id: str, now: float) -> None:
        """Fail a request whose KV does not come, or compute it here, depending on the policy."""
        sequence = self._loads.pop(request_id)
        self.connector.failed(request_id)
        self.connector.arrived(request_id)
        if sequence.state is RequestState.ENDED:
            self.pool.release(sequence.blocks)
        elif self.facts.kv_load_failure_policy == "recompute":
            sequence.state = RequestState.WAITING
            self._waiting.put_back(sequence)
        else:
            self._fail(sequence, now)
        self._update_gauges()

    def _read_failed(self, sequence: ActiveRequest, now: float) -> None:
        """Its KV could not be read before its first step: fail it or compute it here, depending on
        the policy.
        """
        self.connector.broken.discard(sequence.request.id)
        self.stats.failed_transfers += 1
        self._unmatch(sequence)
        if self.facts.kv_load_failure_policy == "recompute":
            sequence.scheduled_before = True  # nothing is looked for elsewhere any more
            sequence.count_start(self.stats, sequence.prompt, 0, now)
        else:
            self._end(sequence, "error", now)
            self._outputs.append(
                EngineOutput(request_id=sequence.request.id, finish_reason="error")
            )

    def written_by_peer(self, request_id: str, tokens: int) -> None:
        """The KV of a waiting request is in its blocks."""
        if (sequence := self._loads.pop(request_id, None)) is not None:
            self._arrived(sequence, request_id, tokens, sequence.prompt)

    def handshaken(self, peer: SideChannelPeer, found: Greeting | None, now: float) -> None:
        """Take the answer to a handshake; None: no engine answered in time."""
        for request_id in self.nixl.handshaken(peer, found):
            self.never_received(request_id, now)

    def next_timer(self) -> float | None:
        """Return when `begin` has work without an event: a lease or a wait ends, or a heartbeat is
        due.
        """
        timers = (self.connector.next_timer(), self.ec_connector.next_timer())
        return min((timer for timer in timers if timer is not None), default=None)

    @property
    def commands(self) -> deque[Any]:
        """The commands that the driver must carry out."""
        return self.connector.outbox

    @property
    def nixl(self) -> Nixl:
        """The connector of an engine that has NIXL."""
        assert isinstance(self.connector, Nixl)
        return self.connector

    def _update_gauges(self) -> None:
        self.stats.running = len(self._running)
        self.stats.waiting = len(self._waiting) + len(self._loads)
        self.stats.deferred = len(self._waiting.deferred) + len(self._loads)
        self.stats.kv_cache_usage = self.pool.usage
