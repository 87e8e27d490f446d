"""From rows to the numbers of `Hardware`, each with its spread, and what the rows can't show.
Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import structs

from pdproxy.engine_model.hardware import Hardware
from pdproxy_lab.calibrate.rows import AloneRow, ChunkRow, DecodeRow
from pdproxy_lab.calibrate.solve import Row, Spread, deviations, fit, spread

_ROUNDS = 12
_CLOSE = 1.25
_CLOSE_BY = 0.002
"""Two ways to read the weights are told apart if one misses by 1.25 times as much as the other,
plus 0.2 %.
"""
_MOST_SPREAD = 0.5
"""A profile without these terms is of no use; their spread may be half of their value."""


class CantTellError(Exception):
    """The measurements do not say what a profile needs. `str()` is one line."""


@dataclass(slots=True)
class Fitted:
    """What was found."""

    hardware: Hardware
    spreads: dict[str, Spread] = field(default_factory=dict)
    """By fields of `Hardware`: the terms that were measured."""
    assumed: list[str] = field(default_factory=list)
    """What was not measured, or had no effect that shows, in words."""


def fitted(
    decodes: Sequence[DecodeRow],
    chunks: Sequence[ChunkRow],
    alone: Sequence[AloneRow],
    budget: int | None,
) -> Fitted:
    """Fit all terms of one engine. `budget`: `--max-num-batched-tokens`, None if it is not known.

    Raises:
        CantTellError: the rows are too few, or differ too much.
    """
    weights, per_sequence, context, assumed = _decode(decodes)
    best = _prefill(chunks, alone, weights.value, per_sequence.value, context.value, budget)
    overhead, base, per_token, attention, begin = best.spreads
    if per_token.value <= 0 or per_token.relative > _MOST_SPREAD:
        raise CantTellError(
            f"the time per prompt token can't be determined: {_range(per_token, 1e6, 'µs')}"
        )
    if best.unsure:
        assumed.append(
            "whether prefill and decode share the reading of the weights: assumed that they do"
        )
    assumed.append(
        "request_overhead_s has all of the overhead: a client can't see how much of it is on the "
        "way back"
    )
    found = {
        "decode_step_s": Spread(
            weights.value + per_sequence.value,
            weights.low + per_sequence.value,
            weights.high + per_sequence.value,
        ),
        "decode_step_per_seq_s": per_sequence,
        "context_token_s": context,
        "chunk_base_s": base,
        "attention_s": attention,
        "prompt_begin_s": begin,
        "request_overhead_s": overhead,
    }
    for name, one in list(found.items()):
        if one.value <= 0:
            assumed.append(f"{name} is 0: no effect shows in these measurements")
            del found[name]
    terms = {name: found[name].value if name in found else 0.0 for name in _TERMS}
    hardware = structs.replace(
        Hardware(prefill_tokens_per_s=1 / per_token.value, weights_read_once=best.once), **terms
    )
    found["prefill_tokens_per_s"] = Spread(
        1 / per_token.value, 1 / per_token.high, 1 / max(per_token.low, 1e-12)
    )
    return Fitted(hardware, found, assumed)


_TERMS = (
    "decode_step_s",
    "decode_step_per_seq_s",
    "context_token_s",
    "chunk_base_s",
    "attention_s",
    "prompt_begin_s",
    "request_overhead_s",
)


def _decode(rows: Sequence[DecodeRow]) -> tuple[Spread, Spread, Spread, list[str]]:
    """Return weights_s, seconds per sequence and per token of context."""
    if len({row.streams for row in rows}) < 2:
        raise CantTellError(
            "decode steps of two numbers of streams at least are needed: the time was too short "
            "(--max-seconds), or tokens came"
            " together instead of one by one"
        )
    table: list[Row] = [(1.0, float(row.streams), row.context) for row in rows]
    values = [row.seconds for row in rows]
    weights, per_sequence, context = without_noise(table, values, values, keep=(0,))
    if weights.value <= 0 or weights.relative > _MOST_SPREAD:
        raise CantTellError(
            f"the time of a decode step can't be determined: {_range(weights, 1e3, 'ms')}"
        )
    assumed = []
    if max(row.context / row.streams for row in rows) < 256:
        assumed.append("context_token_s: only short contexts could be measured")
    return weights, per_sequence, context, assumed


@dataclass(frozen=True, slots=True)
class _Prefill:
    once: bool
    spreads: list[Spread]
    """Overhead, base of a chunk, per token, attention, what a prompt adds to its first step."""
    loss: float
    unsure: bool = False


@dataclass(frozen=True, slots=True)
class _Table:
    rows: list[Row]
    values: list[float]
    sizes: list[float]


def _prefill(
    chunks: Sequence[ChunkRow],
    alone: Sequence[AloneRow],
    weights: float,
    per_sequence: float,
    context: float,
    budget: int | None,
) -> _Prefill:
    if len({row.tokens for row in chunks} | {row.tokens for row in alone}) < 3:
        raise CantTellError("prompts of three lengths at least are needed")
    measured = [
        (row, row.seconds - row.context * context - row.steps * row.streams * per_sequence)
        for row in chunks
    ]
    ways = []
    for once in (True, False):
        least = weights if once else 0.0
        base = per_token = float("inf")
        table = _Table([], [], [])
        for _ in range(_ROUNDS):
            table = _table(measured, alone, weights, base, per_token, budget, once)
            found = fit(table.rows, table.values, table.sizes)
            if (found[1], found[2]) == (base, per_token):
                break
            base, per_token = found[1], found[2]
            if not least:
                break
        misses = deviations(table.rows, table.values, table.sizes, found)
        ways.append((sum(misses) / len(misses), once, table))
    ways.sort(key=lambda way: way[0])
    (loss, once, table), (other, _, _) = ways
    unsure = other <= loss * _CLOSE + _CLOSE_BY
    if unsure and not once:
        loss, once, table = ways[1]
    return _Prefill(
        once,
        without_noise(table.rows, table.values, table.sizes, keep=(2,), spare=(3, 4)),
        loss,
        unsure,
    )


def _table(
    measured: Sequence[tuple[ChunkRow, float]],
    alone: Sequence[AloneRow],
    weights: float,
    base: float,
    per_token: float,
    budget: int | None,
    once: bool,
) -> _Table:
    """Return the linear system. Chunks that take less than the weights, by `base` and `per_token`,
    count as the weights.
    """
    steps_of = {row.tokens: row.steps for row, _ in measured}
    table = _Table([], [], [])

    def add(
        overhead: float, tokens: int, sizes: Sequence[float], seconds: float, size: float
    ) -> None:
        # In the first round, base and per_token are infinite: all chunks count.
        counted = [one for one in sizes if not once or base + one * per_token >= weights]
        if once:
            seconds -= (len(sizes) - len(counted)) * weights
        table.rows.append((overhead, float(len(counted)), sum(counted), tokens * tokens / 2, 1.0))
        table.values.append(seconds)
        table.sizes.append(size)

    for row, left in measured:
        rest = left if once else left - row.steps * weights
        add(
            0.0,
            row.tokens,
            _sizes(row.tokens, row.steps, None if budget is None else budget - row.streams),
            rest,
            row.seconds,
        )
    for one in alone:
        steps = steps_of.get(one.tokens, 1) if budget is None else -(-one.tokens // budget)
        add(1.0, one.tokens, _sizes(one.tokens, steps, budget), one.seconds, one.seconds)
    return table


def _sizes(tokens: int, steps: int, budget: int | None) -> list[float]:
    """Return the tokens of each chunk of a prompt."""
    if budget is None or -(-tokens // budget) != steps:
        return [tokens / steps] * steps
    return [float(min(budget, tokens - place * budget)) for place in range(steps)]


def without_noise(
    rows: Sequence[Row],
    values: Sequence[float],
    sizes: Sequence[float],
    *,
    keep: Sequence[int] = (),
    spare: Sequence[int] = (),
    squares: bool = False,
) -> list[Spread]:
    """Return the fit without the columns that resampling lets vanish, one after the other; those in
    `keep` stay.

    Columns in `spare` are left out, too, while those in `keep` are not known well enough.
    `squares`: see `solve.fit`.
    """
    width = len(rows[0])
    columns = list(range(width))
    found: dict[int, Spread] = {}
    while columns:
        part = [tuple(row[column] for column in columns) for row in rows]
        found = dict(zip(columns, spread(part, values, sizes, squares=squares), strict=True))
        vague = [column for column in columns if column not in keep and found[column].low <= 0]
        if not vague and any(found[column].relative > _MOST_SPREAD for column in keep):
            # Too many terms for these rows: without the one with the least effect, the others may
            # be known.
            vague = [column for column in columns if column in spare]
        if not vague:
            break
        columns.remove(
            min(
                vague,
                key=lambda column: found[column].value * max(abs(row[column]) for row in rows),
            )
        )
    return [
        found[column] if column in columns else Spread(0.0, 0.0, 0.0) for column in range(width)
    ]


def _range(one: Spread, factor: float, unit: str) -> str:
    scaled = one.scaled(factor)
    return f"{scaled.value:.4g} {unit}, resampled {scaled.low:.4g} to {scaled.high:.4g}"
