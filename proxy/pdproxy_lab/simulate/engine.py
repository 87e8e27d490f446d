"""A virtual engine whose costs don't grow with tokens: one step is O(1), and equal decode steps are
passed in one event. Pure.

It schedules as `sim.core` does, whose rules are those of vLLM's v1 scheduler: running requests
first, then waiting ones that hold blocks, then others that fit whole, a token budget per step,
prompts in chunks, the youngest request is preempted when blocks run out. All prompts but one that
are being
computed are whole in a step, since the one that is cut takes the rest of the budget. So the state
is: the requests that decode (their number, the sum of their contexts), at most one prompt that is
cut, and those that wait.

Decode steps are passed until the next request ends, and their time is the sum of an arithmetic
series, since a step's time is linear in the context. Something that comes in between ends the run
at the end of the step that is under way. A request's last step is known when it begins to decode; a
heap has them. Its worst gap is found in `gaps.WorstGaps`.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush

from pdproxy.engine_model.hardware import Hardware, attended
from pdproxy_lab.sim.receiving_line import ReceivingLine
from pdproxy_lab.simulate.gaps import Histogram, WorstGaps
from pdproxy_lab.simulate.memory import KVMemory
from pdproxy_lab.simulate.shape import Shape
from pdproxy_lab.simulate.work import At, Listener, Work


class ModelledEngine:
    """One engine. `at` is how it plans its next event."""

    def __init__(
        self, hardware: Hardware, shape: Shape, at: At, listener: Listener, itl: Histogram
    ) -> None:
        self._hardware, self._shape, self._at, self._listener, self._itl = (
            hardware,
            shape,
            at,
            listener,
            itl,
        )
        self.memory = KVMemory(shape.blocks, shape.unit_tokens // shape.block_size)
        self._line = ReceivingLine(hardware)
        self._budget = shape.max_num_batched_tokens
        self._max_seqs = min(shape.max_num_seqs, self._budget)
        self._waiting: deque[Work] = deque()
        self._loaded_waiting: deque[Work] = deque()
        """Those whose KV came from elsewhere: they hold blocks, and go before the others."""
        self._loading = 0
        """Those whose KV is on its way."""
        self._decoding: dict[Work, None] = {}
        """In the order in which they began to run."""
        self._ends: list[tuple[int, int, Work]] = []
        self._due = [0] * shape.block_size
        """How many of the decoding requests need a block in steps with this remainder."""
        self._context = 0
        """The sum of the decoding requests' tokens."""
        self._partial: Work | None = None
        """The prompt that is cut: the youngest running request."""
        self._chunks: list[tuple[Work, int]] = []
        """The prompts of the step, and how many tokens it computes of each."""
        self._pulls = self._pulled_tokens = 0
        self._begun = 0
        """Prompts that the step begins to compute."""
        self._gaps = WorstGaps()
        self._tickets = 0
        # The run of steps that is under way: its number of steps (0: none), its start, the first
        # step's time, and how much longer each further one is.
        self.steps = 0
        """Steps that have ended."""
        self._planned = 0
        self._start = self._first = self._increment = 0.0
        self._version = 0
        self.busy_s = 0.0
        self.prefill_s = 0.0
        """Seconds of steps with a part of a prompt."""
        self.prefill_tokens = self.decode_tokens = self.cached_tokens = self.preemptions = 0

    # -- from outside

    def submit(self, work: Work, now: float) -> None:
        """Queue a request."""
        self._waiting.append(work)
        self._wake(now)

    def release(self, work: Work, now: float) -> None:
        """Free blocks that were kept after a request's end."""
        self.memory.release(self._blocks(work.computed), work.held)
        if self._waiting or self._loaded_waiting:
            self._wake(now)

    @property
    def requests(self) -> int:
        """Its requests, as vLLM reports them: those that run, and those that wait, for KV
        included.
        """
        computing = len(self._chunks) or int(self._partial is not None)
        return (
            len(self._waiting)
            + len(self._loaded_waiting)
            + self._loading
            + len(self._decoding)
            + computing
        )

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not (self._planned or self._waiting or self._loaded_waiting)

    def _wake(self, now: float) -> None:
        if not self._planned:
            self._begin(now)
        elif self._planned > 1:
            self._cut(now)

    def _cut(self, now: float) -> None:
        """End the run of steps with the step that is under way."""
        elapsed, first, increment = now - self._start, self._first, self._increment
        slope = first - increment / 2
        count = max(
            math.ceil(2 * elapsed / (slope + math.sqrt(slope * slope + 2 * increment * elapsed))), 1
        )
        while self._after(count) < elapsed:
            count += 1
        while count > 1 and self._after(count - 1) >= elapsed:
            count -= 1
        if count < self._planned:
            self._planned = count
            self._version += 1
            self._at(self._start + self._after(count), self._finish, self._version)

    def _after(self, count: int) -> float:
        """Return the time of the run's first steps."""
        return count * self._first + self._increment * (count * (count - 1) // 2)

    # -- a step begins

    def _begin(self, now: float) -> None:
        """Plan the next step, or the next run of decode steps; do nothing if there is no work."""
        step, size = self.steps + 1, self._shape.block_size
        memory, preempted = self.memory, False
        need = self._due[step % size]
        while need > memory.available:
            preempted = True
            self._preempt(now)
            need = self._due[step % size]
        if need:
            memory.take(need)
        decoding = len(self._decoding)
        budget = self._budget - decoding
        partial = self._partial
        if partial is not None:
            count = min(partial.length - partial.computed, budget)
            need = self._blocks(partial.computed + count) - self._blocks(partial.computed)
            if need > memory.available:
                preempted = True
                self._preempt(now)
            else:
                memory.take(need)
                self._chunks.append((partial, count))
                budget -= count
        if (self._waiting or self._loaded_waiting) and not preempted:
            self._admit(budget, decoding, now)
        self._plan(decoding, now, single=preempted)
        if preempted and not self._planned:
            self._begin(now)

    def _preempt(self, now: float) -> None:
        """Preempt the youngest request: it will compute everything again."""
        work = self._partial
        if work is not None:
            self._partial = None
            tokens = work.computed
        else:
            work, _ = self._decoding.popitem()
            tokens = self._leave(work)
            work.last_at = now
        self.memory.release(self._blocks(tokens), work.held)
        work.held, work.units, work.computed, work.ticket = [], 0, 0, -1
        self._waiting.appendleft(work)
        self.preemptions += 1

    def _admit(self, budget: int, running: int, now: float) -> None:
        """Add the requests that may begin."""
        memory, shape, chunks = self.memory, self._shape, self._chunks
        running += len(chunks)
        while budget and running < self._max_seqs:
            waiting = self._loaded_waiting or self._waiting
            if not waiting:
                break
            work = waiting[0]
            length, known, unused, later = work.prompt + work.made, work.computed, 0, False
            found = 0
            if not work.loaded:
                if shape.enable_prefix_caching and work.keys:
                    found, unused = memory.find(work.keys, (length - 1) // shape.unit_tokens)
                known = found * shape.unit_tokens
                later = work.pulls
            count = min(length - known, budget)
            has = self._blocks(work.prompt if work.loaded else known)
            # The whole request must fit: vLLM's `scheduler_reserve_full_isl`. One whose KV comes
            # can't be preempted meanwhile, so what the prompt that is cut still needs stays free.
            whole = self._blocks(length) - has + unused + (self._reserved() if later else 0)
            if whole > memory.available:
                break
            need = self._blocks(length if later else known + count) - has
            waiting.popleft()
            if found:
                self.cached_tokens += known
                work.held = list(work.keys[:found])
                memory.hold(work.held)
                work.units = found
            if need > 0:
                memory.take(need)
            work.computed = known
            if later:
                work.pulls = False
                self._pulls += 1
                self._loading += 1
                self._pulled_tokens += length - known
                self._at(now + self._line.add(now, length - known), self._loaded, work)
                continue
            self._begun += count > 1
            work.loaded = False
            chunks.append((work, count))
            budget -= count
            running += 1

    def _reserved(self) -> int:
        """Return the blocks that the prompt which is cut in this step will still need."""
        if not self._chunks:
            return 0
        work, count = self._chunks[-1]
        return self._blocks(work.length) - self._blocks(work.computed + count)

    def _plan(self, decoding: int, now: float, *, single: bool) -> None:
        """Plan the end of the steps that begin now. `single`: only one, since a request that waits
        may begin after it.
        """
        context, hardware, pulls = self._context, self._hardware, self._pulls
        self._start, self._increment, count = now, 0.0, 1
        if self._chunks or pulls:
            prefill, pairs = 0, 0.0
            for work, tokens in self._chunks:
                if tokens == 1:
                    decoding += 1
                    context += work.computed
                else:
                    prefill += tokens
                    pairs += attended(tokens, work.computed)
            seconds = hardware.step_s(
                prefill, decoding, context, pairs, pulls, self._begun, self._pulled_tokens
            )
            self._pulls = self._begun = self._pulled_tokens = 0
            if not self._chunks and not decoding and not seconds:
                return
            self._first = seconds
            if prefill:
                self.prefill_s += seconds
                self.prefill_tokens += prefill
        elif decoding:
            self._first = seconds = hardware.step_s(0, decoding, context)
            count = 1 if single else self._until_next(decoding)
            if count > 1:
                last = hardware.step_s(0, decoding, context + (count - 1) * decoding)
                self._increment = (last - seconds) / (count - 1)
                seconds = self._after(count)
        else:
            return
        self._planned = count
        self._version += 1
        self._at(now + seconds, self._finish, self._version)

    def _until_next(self, decoding: int) -> int:
        """Return for how many steps nothing changes: until a request ends, or until blocks may run
        out.
        """
        ends = self._ends
        while ends[0][2].ticket != ends[0][1]:
            heappop(ends)
        count = ends[0][0] - self.steps
        size, available = self._shape.block_size, self.memory.available
        if (count // size + 1) * decoding > available:
            taken, place = 0, 1
            while place < count:
                taken += self._due[(self.steps + 1 + place) % size]
                if taken > available:
                    return place
                place += 1
        return count

    # -- steps end

    def _finish(self, version: int, now: float) -> None:
        """Carry out the run that has ended now, if it is still the one that was planned."""
        if version != self._version:
            return
        count, self._planned = self._planned, 0
        self.busy_s += now - self._start
        before, self.steps = self.steps, self.steps + count
        decoding = len(self._decoding)
        if decoding:
            self._decoded(decoding, before, count, now)
        chunks = self._chunks
        if chunks:
            self._chunks, self._partial = [], None
            for work, tokens in chunks:
                self._computed(work, tokens, now)
        self._begin(now)

    def _decoded(self, decoding: int, before: int, count: int, now: float) -> None:
        steps = self.steps
        self.decode_tokens += count * decoding
        self._context += count * decoding
        if count > 1:
            last = self._first + self._increment * (count - 1)
            self._itl.add_rising(self._first, self._increment, count, decoding)
            self.memory.take(self._grown(before + 2, count - 1, decoding))
        else:
            last = self._first
            self._itl.add(last, decoding)
        self._gaps.add(steps, last)
        ends = self._ends
        while ends and ends[0][0] <= steps:
            _, ticket, work = heappop(ends)
            if work.ticket != ticket:
                continue  # it was preempted
            del self._decoding[work]
            work.computed = self._leave(work)
            work.made = work.output
            self._over(work, now)
        if not self._decoding:
            self._gaps = WorstGaps()
        elif len(self._gaps) > 0:
            self._gaps.forget(next(iter(self._decoding)).joined)

    def _grown(self, step: int, count: int, decoding: int) -> int:
        """Return how many blocks the decoding requests need in `count` steps from `step` on."""
        size = self._shape.block_size
        cycles, rest = divmod(count, size)
        return cycles * decoding + sum(
            self._due[place % size] for place in range(step, step + rest)
        )

    def _leave(self, work: Work) -> int:
        """A request decodes no longer. Return how many tokens it has."""
        tokens = work.base + self.steps - work.joined
        self._context -= tokens
        self._due[work.slot] -= 1
        work.worst_s = max(work.worst_s, self._gaps.worst_after(work.joined))
        work.made = tokens - work.prompt + 1
        return tokens

    def _computed(self, work: Work, tokens: int, now: float) -> None:
        """A part of a prompt was computed."""
        work.computed += tokens
        self._remember(work)
        if work.computed < work.prompt + work.made:
            self._partial = work
            return
        if work.first_at is None:
            work.first_at = now
            self._listener.began(work, now)
        else:  # it was preempted
            gap = now - work.last_at
            work.worst_s = max(work.worst_s, gap)
            self._itl.add(gap)
        work.made += 1
        if work.made >= work.output:
            self._over(work, now)
            return
        work.base, work.joined = work.computed, self.steps
        work.slot = (self.steps + 1 - work.base) % self._shape.block_size
        work.end_step = self.steps + work.output - work.made
        self._tickets += 1
        work.ticket = self._tickets
        self._due[work.slot] += 1
        self._context += work.base
        self._decoding[work] = None
        heappush(self._ends, (work.end_step, work.ticket, work))

    def _over(self, work: Work, now: float) -> None:
        work.last_at, work.ticket = now, -1
        if not self._listener.ended(work, now):
            self.memory.release(self._blocks(work.computed), work.held)

    def _remember(self, work: Work) -> None:
        if not work.keys or not self._shape.enable_prefix_caching:
            return
        full = min(work.computed // self._shape.unit_tokens, len(work.keys))
        for place in range(work.units, full):
            if self.memory.remember(key := work.keys[place]):
                work.held.append(key)
        work.units = max(work.units, full)

    def _loaded(self, work: Work, now: float) -> None:
        """The KV of a request's prompt is here. The last token is computed again, for its
        output.
        """
        work.computed = work.prompt
        self._remember(work)
        work.computed -= 1
        work.loaded = True
        self._loading -= 1
        self._loaded_waiting.append(work)
        self._listener.pulled(work, now)
        self._wake(now)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._shape.block_size)
