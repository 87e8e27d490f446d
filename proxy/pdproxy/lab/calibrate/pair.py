"""What a pair of engines adds to one: the handoff, the transfer, and how long pulls stall the decode engine. Knows no sockets.

The same prompts go through the pair and to the decode engine alone. The difference is the handoff, the transfer and one more
step; both engines are taken to be equal.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from msgspec import structs

from pdproxy.lab.calibrate.experiments import SHORT, Limits
from pdproxy.lab.calibrate.fitting import CantTellError, Fitted
from pdproxy.lab.calibrate.solve import Row, Spread, spread
from pdproxy.lab.calibrate.trials import MergedError, OutOfTimeError, Runner, Seen, Trial

_ROUNDS = 4
_SMALLEST = 256
_LADDER = 2
_STREAMS = 2
_OUTPUT = 120
_SEVERAL = 4
_SEVERAL_TOKENS = 128
_SHARE = 0.02
_SHOWS = 0.2
"""A stall counts if it is so long, in decode steps."""
_FASTEST = 1e15
"""Bytes per second of a link whose transfers take no time that shows."""


@dataclass(frozen=True, slots=True)
class PairRow:
    """A prompt through the pair and one of the same length at the decode engine alone: seconds to the first token."""

    tokens: int
    pair: float
    alone: float


@dataclass(frozen=True, slots=True)
class StallRow:
    """Pulls beside streams: in how many steps they began, by how many seconds these steps were longer together."""

    pulls: int
    steps: int
    seconds: float


@dataclass(slots=True)
class PairMeasured:
    """All that was carried out."""

    rows: list[PairRow] = field(default_factory=list)
    stalls: list[StallRow] = field(default_factory=list)
    trials: int = 0


async def measure(
    through: Runner, alone: Runner, limits: Limits, per_token: float, on_trial: Callable[[str], None] | None = None
) -> PairMeasured:
    """Carry out the trials, or what the time is enough for. `per_token`: seconds of prefill, which bound the lengths.

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

    longest = min(limits.max_model_len - 2, limits.seconds * _SHARE / per_token, (limits.kv_tokens or 1 << 30) * 0.8)
    lengths = [_SMALLEST << place for place in range(24) if _SMALLEST << place <= longest] or [int(longest)]
    few = Trial("a pull beside streams", _STREAMS, SHORT, _OUTPUT, (_SMALLEST,))
    several = Trial("pulls beside streams", _STREAMS, SHORT, _OUTPUT, (_SEVERAL_TOKENS,) * _SEVERAL)
    most = limits.max_num_seqs or few.streams + len(several.beside)
    beside = [trial for trial in (few, several) if trial.streams + len(trial.beside) <= most]
    try:
        await do(through, Trial("warm-up of the pair", beside=(64,)))
        for _ in range(_ROUNDS):
            for tokens in lengths:
                pair = await do(through, Trial(f"a prompt of {tokens} tokens through the pair", beside=(tokens,)))
                plain = await do(alone, Trial(f"a prompt of {tokens} tokens", beside=(tokens,)))
                found.rows.append(PairRow(tokens, pair.beside[0].ttft, plain.beside[0].ttft))
            for trial in beside:
                with contextlib.suppress(MergedError):
                    row = stall_row(trial, await do(through, trial))
                    found.stalls += [row] if row is not None else []
    except OutOfTimeError:
        pass
    return found


def stall_row(trial: Trial, seen: Seen) -> StallRow | None:
    """Return by how much the streams' steps were longer while the prompts were under way; None: the streams ended before."""
    times = seen.streams[0]
    begin, end = min(one.sent for one in seen.beside), max(one.answered for one in seen.beside)
    if end > times[-1]:
        return None
    gaps = [(after - before, begin < after <= end) for before, after in itertools.pairwise(times)]
    usual = median(gap for gap, within in gaps if not within) if any(not within for _, within in gaps) else 0.0
    longer = [gap - usual for gap, within in gaps if within and gap > usual * (1 + _SHOWS)]
    return StallRow(len(trial.beside), len(longer), sum(longer))


def with_pair(found: Fitted, measured: PairMeasured, bytes_per_token: int | None) -> Fitted:
    """Return the terms with those of the pair. `bytes_per_token`: of KV, where the decode engine's metrics show it.

    Raises:
        CantTellError: the prompts through the pair were too few.
    """
    if len({row.tokens for row in measured.rows}) < 2:
        raise CantTellError("prompts of two lengths through the pair at least are needed")
    hardware = found.hardware
    table: list[Row] = [(1.0, float(row.tokens)) for row in measured.rows]
    values = [row.pair - row.alone - hardware.step_s(0, 1, row.tokens) for row in measured.rows]
    fixed, per_token = spread(table, values, [row.pair for row in measured.rows])
    pull, further = _stalls(measured.stalls)
    spreads, assumed = dict(found.spreads), list(found.assumed)
    if bytes_per_token is None:
        bytes_per_token = hardware.kv_bytes_per_token
        assumed.append(f"kv_bytes_per_token = {bytes_per_token}: not shown; link_bytes_per_s belongs to it")
    link = _FASTEST
    if per_token.low > 0:
        link = min(bytes_per_token / per_token.value, _FASTEST)
        spreads["link_bytes_per_s"] = Spread(link, bytes_per_token / per_token.high, bytes_per_token / per_token.low)
    else:
        assumed.append("link_bytes_per_s: transfers take no time per token that shows")
    handoff = max(fixed.value - (pull.value if pull is not None else 0.0), 0.0)
    if handoff > 0:
        width = (fixed.high - fixed.low) / 2
        spreads["handoff_overhead_s"] = Spread(handoff, max(handoff - width, 0.0), handoff + width)
    assumed.append("handoff_overhead_s has the transfer's latency and the hops of the proxy, too")
    assumed.append("transfers_in_line: assumed")
    single, several = (any((row.pulls > 1) is more for row in measured.stalls) for more in (False, True))
    for name, one, pulls in (("pull_s", pull, single), ("further_pull_s", further, several)):
        if one is not None and one.value > 0:
            spreads[name] = one
        else:
            why = "no stall shows beside streams" if pulls else "not measured, the streams ended before the pulls"
            assumed.append(f"{name} is 0: {why}")
    return Fitted(
        structs.replace(
            hardware,
            kv_bytes_per_token=bytes_per_token,
            link_bytes_per_s=link,
            transfer_latency_s=0.0,
            transfers_in_line=True,
            handoff_overhead_s=handoff,
            pull_s=0.0 if pull is None else pull.value,
            further_pull_s=0.0 if further is None else further.value,
        ),
        spreads,
        assumed,
    )


def _stalls(rows: list[StallRow]) -> tuple[Spread | None, Spread | None]:
    """Return the stall of a step's first pull, and of each further one. None: none shows."""
    single = sorted(row.seconds for row in rows if row.pulls == 1 and row.steps)
    if 2 * len(single) <= sum(row.pulls == 1 for row in rows):
        return None, None
    pull = Spread(median(single), single[0], single[-1])
    more = sorted(
        max(row.seconds - row.steps * pull.value, 0.0) / (row.pulls - row.steps)
        for row in rows
        if 0 < row.steps < row.pulls
    )
    return pull, Spread(median(more), more[0], more[-1]) if more else None
