"""What a pair of engines adds to one: the handoff, the transfer, and how long pulls stall the
decode engine. Knows no sockets.

The same prompts go through the pair and to the decode engine alone. The difference is the handoff,
the transfer and one more step; both engines are taken to be equal. Prompts through the pair beside
streams of the decode engine show the stalls.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from pdproxy.engine_model.hardware import Hardware, attended
from pdproxy_lab.calibrate.experiments import SHORT, ExperimentLimits
from pdproxy_lab.calibrate.fitting import CantTellError, Fitted
from pdproxy_lab.calibrate.solve import Row, Spread, spread
from pdproxy_lab.calibrate.stalls import TERMS, StallRow, fitted_stalls, stall_row
from pdproxy_lab.calibrate.trials import (
    BESIDE_AFTER,
    MergedError,
    OutOfTimeError,
    Runner,
    Seen,
    Trial,
)

_ROUNDS = 8
_WITHOUT_STREAMS = 2
"""One of so many rounds has the prompts without streams, too: these vary less than stalls do."""
_SMALLEST = 256
_LADDER = 2
_LARGEST_PULL = 4096
"""Tokens of the largest pull beside streams. Larger ones take as much longer as the fit says."""
_STREAMS = 2
_SEVERAL = 4
"""Pulls that are asked for at once."""
_AFTER = 32
"""Tokens of a stream after the last pull should have ended."""
_MOST_OUTPUT = 1024
_SHARE = 0.02
"""The share of the whole time that one prompt may take."""
_KV_SHARE = 0.8
_FASTEST = 1e15
"""Bytes per second of a link whose transfers take no time that shows."""


@dataclass(frozen=True, slots=True)
class PairRow:
    """A prompt through the pair and one of the same length at the decode engine alone: seconds to
    the first token.
    """

    tokens: int
    pair: float
    alone: float


@dataclass(slots=True)
class PairMeasured:
    """All that was carried out."""

    rows: list[PairRow] = field(default_factory=list)
    stalls: list[StallRow] = field(default_factory=list)
    seen: list[tuple[Trial, Seen]] = field(default_factory=list)
    """The trials through the pair, but for its warm-up."""
    trials: int = 0


async def measure(
    through: Runner,
    alone: Runner,
    limits: ExperimentLimits,
    hardware: Hardware,
    on_trial: Callable[[str], None] | None = None,
) -> PairMeasured:
    """Carry out the trials, or what the time is enough for. `hardware`: the terms of one engine,
    which bound the lengths.

    `through`: sends streams to the decode engine and prompts beside them through the pair.

    Raises:
        TrialError: one failed.
    """
    found = PairMeasured()

    async def do(run: Runner, trial: Trial) -> Seen:
        if on_trial is not None:
            on_trial(trial.name)
        found.trials += 1
        return await run(trial)

    lengths = _lengths(limits, hardware)
    beside = _Beside(limits, hardware, lengths)
    try:
        await do(through, Trial("warm-up of the pair", beside=(64,)))
        for tokens in lengths:
            # The first pulls map the memory of the other engine, and take up to three times as
            # long.
            seen = await do(
                through, Trial(f"warm-up of the pair with {tokens} tokens", beside=(tokens,))
            )
            beside.takes(tokens, seen.beside[0].ttft)
        for number in range(_ROUNDS):
            for tokens in lengths if number % _WITHOUT_STREAMS == 0 else ():
                trial = Trial(f"a prompt of {tokens} tokens through the pair", beside=(tokens,))
                pair = await do(through, trial)
                plain = await do(alone, Trial(f"a prompt of {tokens} tokens", beside=(tokens,)))
                found.seen.append((trial, pair))
                found.rows.append(PairRow(tokens, pair.beside[0].ttft, plain.beside[0].ttft))
                beside.takes(tokens, pair.beside[0].ttft)
            for count, tokens in beside.kinds:
                trial = beside.trial(count, tokens)
                with contextlib.suppress(MergedError):
                    seen = await do(through, trial)
                    row = stall_row(trial, seen, hardware)
                    if row is None:
                        beside.ended(count, tokens)
                    else:
                        found.seen.append((trial, seen))
                        found.stalls.append(row)
    except OutOfTimeError:
        pass
    return found


def _lengths(limits: ExperimentLimits, hardware: Hardware) -> list[int]:
    """Return the lengths of prompts, rising."""
    affordable = limits.seconds * _SHARE * hardware.prefill_tokens_per_s
    longest = min(limits.max_model_len - 2, affordable, (limits.kv_tokens or 1 << 30) * _KV_SHARE)
    return [
        _SMALLEST * _LADDER**place for place in range(24) if _SMALLEST * _LADDER**place <= longest
    ] or [int(longest)]


class _Beside:
    """Pulls beside streams: of which sizes, how many at once, and how long the streams must be so
    that they outlast them.
    """

    def __init__(self, limits: ExperimentLimits, hardware: Hardware, lengths: list[int]) -> None:
        self._limits, self._hardware = limits, hardware
        self._taken: dict[int, float] = {}
        """The least seconds of one prompt through the pair, by its tokens."""
        self._longer: dict[tuple[int, int], int] = {}
        """How many times as long the streams are, where they ended before."""
        sizes = [tokens for tokens in lengths if tokens <= _LARGEST_PULL] or lengths[:1]
        sizes = sorted({sizes[0], sizes[(len(sizes) - 1) // 2], sizes[-1]})
        several = (
            _SEVERAL
            if limits.max_num_seqs is None
            else min(_SEVERAL, limits.max_num_seqs - _STREAMS)
        )
        self.kinds = [
            (count, tokens)
            for count in sorted({1, several})
            for tokens in sizes
            if 0 < count <= several and self._most_output(count, tokens) >= BESIDE_AFTER + _AFTER
        ]
        """How many pulls, and the tokens of each."""

    def takes(self, tokens: int, seconds: float) -> None:
        """Note how long a prompt took through the pair."""
        self._taken[tokens] = min(seconds, self._taken.get(tokens, seconds))

    def ended(self, count: int, tokens: int) -> None:
        """The streams ended before the pulls did: those of the next trial are longer."""
        self._longer[count, tokens] = 2 * self._longer.get((count, tokens), 1)

    def trial(self, count: int, tokens: int) -> Trial:
        """Return the trial of so many pulls of a size."""
        hardware = self._hardware
        seconds = self._taken.get(tokens, 0.0)
        seconds += (count - 1) * hardware.step_s(tokens, 0, attention=attended(tokens, 0), begun=1)
        waits = math.ceil(seconds / hardware.step_s(0, 1)) + _AFTER
        output = BESIDE_AFTER + waits * self._longer.get((count, tokens), 1)
        output = min(output, self._most_output(count, tokens))
        name = "a pull" if count == 1 else f"{count} pulls"
        return Trial(
            f"{name} of {tokens} tokens beside streams", _STREAMS, SHORT, output, (tokens,) * count
        )

    def _most_output(self, count: int, tokens: int) -> int:
        """Return how many tokens a stream may have beside so many pulls."""
        limits = self._limits
        most = min(_MOST_OUTPUT, limits.max_model_len - SHORT)
        if limits.kv_tokens is not None:
            most = min(
                most, int(limits.kv_tokens * _KV_SHARE - count * (tokens + 1)) // _STREAMS - SHORT
            )
        return most


def with_pair(found: Fitted, measured: PairMeasured, bytes_per_token: int | None) -> Fitted:
    """Return the terms with those of the pair. `bytes_per_token`: of KV, where the decode engine's
    metrics show it.

    Raises:
        CantTellError: the prompts through the pair were too few.
    """
    if len({row.tokens for row in measured.rows}) < 2:
        raise CantTellError("prompts of two lengths through the pair at least are needed")
    hardware = found.hardware
    table: list[Row] = [(1.0, float(row.tokens)) for row in measured.rows]
    values = [row.pair - row.alone - hardware.step_s(0, 1, row.tokens) for row in measured.rows]
    fixed, per_token = spread(table, values, [row.pair for row in measured.rows])
    stalls, unseen = fitted_stalls(measured.stalls, hardware.step_s(0, _STREAMS))
    posting = {name: stalls[name].value if name in stalls else 0.0 for name in TERMS}
    spreads, assumed = found.spreads | stalls, list(found.assumed)
    if bytes_per_token is None:
        bytes_per_token = hardware.kv_bytes_per_token
        assumed.append(
            f"kv_bytes_per_token = {bytes_per_token}: not shown; link_bytes_per_s belongs to it"
        )
    link = _FASTEST
    # A pull moves once it has been posted: what is left of the time per token is the link's.
    moving, low, high = (
        one - posting["pull_token_s"] for one in (per_token.value, per_token.low, per_token.high)
    )
    if per_token.low > 0 and moving > 0:
        link = min(bytes_per_token / moving, _FASTEST)
        highest = min(bytes_per_token / low, _FASTEST) if low > 0 else _FASTEST
        spreads["link_bytes_per_s"] = Spread(link, bytes_per_token / high, highest)
    else:
        assumed.append("link_bytes_per_s: transfers take no time per token that shows")
    handoff = max(fixed.value - posting["pull_s"], 0.0)
    if handoff > 0:
        width = (fixed.high - fixed.low) / 2
        spreads["handoff_overhead_s"] = Spread(handoff, max(handoff - width, 0.0), handoff + width)
    assumed.append("handoff_overhead_s has the transfer's latency and the hops of the proxy, too")
    assumed.append("transfers_in_line: assumed")
    assumed += unseen
    return Fitted(
        structs.replace(
            hardware,
            kv_bytes_per_token=bytes_per_token,
            link_bytes_per_s=link,
            transfer_latency_s=0.0,
            transfers_in_line=True,
            handoff_overhead_s=handoff,
            **posting,
        ),
        spreads,
        assumed,
    )
