"""A plan in words, with a table of alternatives. Pure."""

from __future__ import annotations

from pdproxy_lab.plan.answer import LimitReason, PlanAnswer, ratio
from pdproxy_lab.plan.arrangement import Arrangement
from pdproxy_lab.plan.search import FoundArrangement

_FLAG = "--max-num-batched-tokens"
_MAX_ROWS = 16
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "gap": "worst gap", "e2e": "end to end"}


def text(found: PlanAnswer) -> str:
    """Return the report, with a line feed at its end."""
    best = found.best
    if best is None:
        lines = [
            f"No arrangement of {_gpus(found)} keeps {_slo(found)} at any rate.",
            *_hopeless(found),
            *_sizes(found),
        ]
        return "\n".join(lines) + "\n"
    lines = [_headline(best.arrangement), _capacity(found, best), *_asked(found)]
    lines += [*_why(found, best), *_auto(found)]
    return "\n".join([*lines, "", *_table(found, best), *_notes(found)]) + "\n"


def _headline(one: Arrangement) -> str:
    if one.kind == "auto":
        return (
            f"Role any with auto: {_engines_any(one.any)} with {_FLAG} {one.chunk}, policy "
            f"{one.policy}."
        )
    if one.prefill:
        return (
            f"Split: {_engines(one.prefill, 'prefill')} with {_FLAG} {one.prefill_chunk}, "
            f"{_engines(one.decode, 'decode')}"
            f" with {one.chunk}, policy {one.policy}."
        )
    return (
        f"Don't split: {_engines(one.aggregated, 'plain')} with {_FLAG} {one.chunk}, policy "
        f"{one.policy}."
    )


def _engines(count: int, word: str) -> str:
    return f"{count} {word} engine{'' if count == 1 else 's'}"


def _engines_any(count: int) -> str:
    return f"{count} engine{'' if count == 1 else 's'} of role any"


def _slo(found: PlanAnswer) -> str:
    return f"{found.question.slo.name} for {100 * found.question.share:g} % of the requests"


def _capacity(found: PlanAnswer, best: FoundArrangement) -> str:
    return (
        f"This keeps {_slo(found)} up to {_rate(best.rate)} req/s, "
        f"{_rate(best.rate / found.result.gpus)} per GPU."
    )


def _asked(found: PlanAnswer) -> list[str]:
    asked = found.asked
    if asked is None:
        return []
    done = (
        f"At {_rate(asked.rate)} req/s {100 * asked.share:.1f} % are good: "
        f"{_rate(asked.goodput_per_gpu)} good req/s per GPU."
    )
    if asked.kept:
        return [f"{done} Headroom: {100 * max(asked.headroom, 0.0):.0f} %."]
    if asked.headroom >= 0:
        return [
            (
                f"{done} That is too few, though higher rates keep the SLO: with this load, "
                f"capacities are only about right."
            )
        ]
    less = f"{max(-100 * asked.headroom, 1.0):.0f} % less within the SLO"
    return [
        (
            f"{done} That is too much: {_gpus(found)} "
            f"{'serves' if found.result.gpus == 1 else 'serve'} {less}."
        )
    ]


def _hopeless(found: PlanAnswer) -> list[str]:
    """Return what requests miss even at a low rate."""
    low = found.hopeless
    if low is None:
        return []
    parts = [
        f"{100 * missed:.0f} % of the requests miss {_NAMES[name]}"
        for name, missed in low.missed.items()
        if missed > 0
    ]
    one = f"{_engines(low.arrangement.aggregated, 'plain')} with {_FLAG} {low.arrangement.chunk}"
    return [f"Even at {_rate(low.rate)} req/s, with {one}, {', '.join(parts)}."] if parts else []


def _sizes(found: PlanAnswer) -> list[str]:
    """Return what must be said of long requests."""
    sizes, question = found.sizes, found.question
    lines = []
    if sizes.refused:
        lines.append(
            f"{_part(sizes.refused)} of the requests do not fit into an engine's KV memory of "
            f"{question.shape.kv_tokens} tokens:"
            " each is a miss (--kv-tokens, --max-tokens)."
        )
    if sizes.beyond:
        lines.append(
            f"{_part(sizes.beyond)} of the requests are longer than the profile's max_model_len "
            f"of {question.max_model_len}"
            f" tokens, the longest has {sizes.longest}. They are simulated all the same."
        )
    return lines


def _part(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "Under 1 %"


def _gpus(found: PlanAnswer) -> str:
    return f"{found.result.gpus} GPU{'' if found.result.gpus == 1 else 's'}"


def _why(found: PlanAnswer, best: FoundArrangement) -> list[str]:
    other, reason = found.other, found.other_reason
    if other is None or reason is None:
        if found.result.gpus == 1:
            return ["Why: one GPU can't be split."]
        return [(f"Why: no {_others(found)} arrangement keeps the SLO at any rate.")]
    kind = "that splits" if other.arrangement.prefill else "that does not split"
    if found.decides:
        kind = "whose engines keep their roles"
    less = 100 * (1 - other.rate / best.rate)
    gain = f"{less:.0f} % less" if less >= 0.5 else "no more"
    if less < -0.5:
        gain = f"only {-less:.0f} % more, which is not worth it"
    return [
        f"Why: the best one {kind} ({_named(other)}) serves {_rate(other.rate)} req/s, {gain}.",
        f"     At a rate 5 % higher, {_misses(reason)}{_cause(reason)}.",
    ]


def _others(found: PlanAnswer) -> str:
    if found.decides:
        return "static"
    return "plain" if found.splits else "split"


def _named(one: FoundArrangement) -> str:
    this = one.arrangement
    return this.name if this.prefill else f"{this.name}, chunk {this.chunks}"


def _auto(found: PlanAnswer) -> list[str]:
    """Return what engines of role any serve beside the best static arrangement, and why they are
    the answer or not.
    """
    auto, others = found.result.auto, found.result.other_seeds
    if found.result.gpus == 1:
        return []
    if auto is None:
        return ["     Role any with auto keeps the SLO at no rate."]
    words = gain_of(found)
    if words is None:
        return _auto_does(found)
    if found.decides:
        return [f"     {words}.", *_auto_does(found)]
    lines = [f"     Role any with auto ({_named(auto)}) serves {_rate(auto.rate)} req/s: {words}."]
    if auto.rate > (found.result.static or auto).rate:
        both = "" if others is None else " with both"
        lines.append(f"     It must serve over 2 % more{both}, or the simpler one is the answer.")
    return lines


def gain_of(found: PlanAnswer) -> str | None:
    """Return how much more `auto` serves than the best static arrangement; None: one serves
    nothing.
    """
    others, gain = found.result.other_seeds, ratio(found.result.auto, found.result.static)
    if gain is None:
        return None
    words = f"auto / best static = {gain:.2f}"
    if others is None:
        return words
    again = ratio(others.auto, others.static)
    seen = "a static arrangement that keeps the SLO at no rate" if again is None else f"{again:.2f}"
    return f"{words}, and {seen} with {_other_requests(found)}"


def _other_requests(found: PlanAnswer) -> str:
    return "other seeds" if found.question.demand.random else "another beginning of the trace"


def _auto_does(found: PlanAnswer) -> list[str]:
    splits = found.auto_splits
    return [] if splits is None else [f"     It splits {100 * splits:.0f} % of the requests then."]


def _misses(reason: LimitReason) -> str:
    limit = reason.limit
    if limit is None:
        return "its requests miss a limit"
    return f"{100 * reason.missed[limit]:.0f} % of its requests miss the limit of {_NAMES[limit]}"


def _cause(reason: LimitReason) -> str:
    """Return what the engines do meanwhile."""
    parts = []
    for role, busy in reason.busy.items():
        if role == "aggregated":
            share = (
                f": its engines are in steps with prefill for "
                f"{100 * reason.with_prefill[role]:.0f} % of the time"
            )
            return (
                f"{share}, and each such step delays the tokens of all requests"
                if reason.limit in ("tpot", "gap")
                else share
            )
        parts.append(f"{role} engines compute for {100 * busy:.0f} % of the time")
    return f", while {' and '.join(parts)}" if parts else ""


def _table(found: PlanAnswer, best: FoundArrangement) -> list[str]:
    gpus = found.result.gpus
    rows = [("", "chunk", "policy", "req/s", "per GPU", "of the plan")]
    shown = [one for one in found.result.found if one.place is not None][:_MAX_ROWS]
    beside = [one for one in (found.other, found.result.auto) if one and one not in shown]
    shown = [*shown[: _MAX_ROWS - len(beside)], *beside]
    if best not in shown:
        shown.insert(0, best)
    for one in shown:
        this, about = one.arrangement, "" if one.exact else "~"
        share = f"{100 * one.rate / best.rate:.0f} %"
        rows.append(
            (
                this.name,
                this.chunks,
                this.policy,
                about + _rate(one.rate),
                about + _rate(one.rate / gpus),
                share,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join([*left, *right]).rstrip())
    return lines


def _notes(found: PlanAnswer) -> list[str]:
    level = found.result.level
    runs = f"{level.seeds} run{'' if level.seeds == 1 else 's'} of {level.requests} requests"
    return [
        "Rates at which the SLO is just kept. ~: from shorter runs, or at most so much.",
        f"{found.result.runs} simulations; the plan's capacity is from {runs} per rate.",
        *_seqs(found),
        *_sizes(found),
        *_handoffs(found),
        *(found.extrapolated.lines if found.extrapolated is not None else ()),
    ]


def _handoffs(found: PlanAnswer) -> list[str]:
    """Return what must be said of a split by a profile of one engine alone."""
    hardware = found.question.hardware
    some_split = found.splits or found.decides
    if not some_split or hardware.handoff_overhead_s or hardware.pull_s or hardware.pull_token_s:
        return []
    return [
        (
            "The profile has no time for handoffs and for stalls by pulls. A profile of one engine "
            "alone lacks them, and so splits"
        ),
        "look better than they are: measure a pair (pdproxy calibrate --prefill URL --decode URL).",
    ]


def _seqs(found: PlanAnswer) -> list[str]:
    """Return which --max-num-seqs an engine needs: vLLM does not start with a lower
    --max-num-batched-tokens.
    """
    one, seqs = (
        found.best.arrangement if found.best is not None else None,
        found.question.shape.max_num_seqs,
    )
    chunks = () if one is None else (one.prefill_chunk or one.chunk, one.chunk)
    lower = sorted({chunk for chunk in chunks if chunk < seqs})
    values = " and ".join(str(chunk) for chunk in lower)
    return (
        [f"With {_FLAG} {values}, --max-num-seqs must be as low, or vLLM does not start."]
        if lower
        else []
    )


def _rate(rate: float) -> str:
    return f"{rate:.3g}" if rate < 100 else f"{rate:.0f}"
