"""One calibration: asks the engine, carries out the trials, fits, and makes the profile with what
was assumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime

from pdproxy.engine_model.fitted import FittedRanges
from pdproxy.engine_model.profile import MOST, EngineLimits, Origin, Profile
from pdproxy_lab.calibrate import pair
from pdproxy_lab.calibrate.experiments import ExperimentLimits, Experiments, Measured
from pdproxy_lab.calibrate.fitting import Fitted, fitted
from pdproxy_lab.calibrate.http_runner import BusyError, EngineInfo, HttpRunner, Target, Through
from pdproxy_lab.calibrate.misfit import Misfit, misfits, pair_misfits
from pdproxy_lab.calibrate.solve import Spread
from pdproxy_lab.calibrate.stand_in_front import CalibratedPair, in_front_of, splitting
from pdproxy_lab.calibrate.trials import Seen, Trial, TrialError

_USUAL_LENGTH = 4096
"""Where an engine does not say how long a prompt may be."""
_USUAL_BUDGET = 8192
_ALONE_SHARE = 0.6
"""The share of the time for the engine alone, where a pair is measured, too."""
_MOST_KV = 1e8
"""Bytes of KV per token. More is a wrong counter."""
_PAIR_TERMS = (
    "pull_s, further_pull_s, pull_token_s, transfers, handoff_overhead_s:"
    " not measured, one engine alone can't show them"
)


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What is calibrated, and for how long at most."""

    target: Target
    """The engine; of a pair the decode engine."""
    name: str
    accelerator: str
    salt: str
    seconds: float = 300.0
    budget: int | None = None
    """`--max-num-batched-tokens` of the engine, where the user says it."""
    max_num_seqs: int | None = None
    pair: CalibratedPair | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found."""

    profile: Profile
    spreads: dict[str, Spread]
    misfits: list[Misfit]
    budget_note: str
    trials: int
    seconds: float


async def calibrate(
    options: CalibrateOptions, on_trial: Callable[[str], None] | None = None
) -> Calibration:
    """Measure an engine, or a pair, and fit the profile.

    Raises:
        TrialError: a trial failed, an engine had requests of others, or can't be asked.
        CantTellError: the measurements do not say what a profile needs.
    """
    begun = time.perf_counter()
    alone_s = options.seconds if options.pair is None else options.seconds * _ALONE_SHARE
    async with aclosing(HttpRunner(options.target, options.salt, alone_s)) as runner:
        info = await runner.info()
        limits = _limits(info, options, alone_s)
        measured = await Experiments(runner, limits, on_trial).all()
        notes = _of_others(runner, options.target, await runner.others())
    found = fitted(measured.decodes, measured.chunks, measured.alone, measured.budget)
    trials = len(measured.trials)
    through: list[tuple[Trial, Seen]] = []
    if options.pair is None:
        found.assumed.append(_PAIR_TERMS)
    else:
        left = begun + options.seconds - time.perf_counter()
        found, with_it, seen = await _with_pair(
            options, options.pair, found, limits, left, on_trial
        )
        trials += with_it.trials
        through = with_it.seen
        notes += [note for note in seen if note not in notes]
    profile = _profile(options, info, limits, measured, found, notes)
    return Calibration(
        profile=profile,
        spreads=found.spreads,
        misfits=[
            *misfits(measured.trials, profile.options()),
            *pair_misfits(through, profile.options()),
        ],
        budget_note=measured.budget_note,
        trials=trials,
        seconds=time.perf_counter() - begun,
    )


def _of_others(runner: HttpRunner, target: Target, seen: str | None) -> list[str]:
    """Return what must be said of requests of others. `seen`: what shows them.

    Raises:
        BusyError: there were some, and they are not accepted.
    """
    if not runner.readable:
        return [f"the /metrics of {target.url} can't be read: requests of others would not show"]
    if seen is not None and not target.busy:
        raise BusyError(f"{seen} (--busy writes the profile all the same)")
    return [] if seen is None else [seen]


async def _with_pair(
    options: CalibrateOptions,
    engines: CalibratedPair,
    found: Fitted,
    limits: ExperimentLimits,
    seconds: float,
    on_trial: Callable[[str], None] | None,
) -> tuple[Fitted, pair.PairMeasured, list[str]]:
    """Return the terms with those of the pair, what was measured, and what must be said of requests
    of others.
    """
    target = options.target
    prefill = Target(
        engines.prefill,
        target.headers,
        target.tls,
        target.model,
        target.timeout,
        target.busy,
        target.ids,
    )
    async with aclosing(HttpRunner(prefill, options.salt, seconds)) as other:
        await other.info()  # it must be there, and idle
        async with in_front_of(engines) as running:
            through = HttpRunner(
                target, f"{options.salt}:pair", seconds, Through(running.url, running.key)
            )
            plain = HttpRunner(target, f"{options.salt}:plain", seconds)
            async with aclosing(through), aclosing(plain):
                await through.info()
                await plain.info()
                before = await plain.transferred()
                limits = ExperimentLimits(
                    limits.max_model_len,
                    limits.kv_tokens,
                    limits.max_num_seqs,
                    limits.budget,
                    seconds,
                )
                measured = await pair.measure(
                    splitting(running, through), plain, limits, found.hardware, on_trial
                )
                after = await plain.transferred()
                at_decode = await plain.others(
                    through.prompt_tokens + plain.prompt_tokens, pulls=True
                )
        at_prefill = await other.others(through.through_tokens)
    notes = [*_of_others(other, prefill, at_prefill), *_of_others(plain, target, at_decode)]
    return pair.with_pair(found, measured, _bytes_per_token(before, after)), measured, notes


def _bytes_per_token(
    before: tuple[float, float] | None, after: tuple[float, float] | None
) -> int | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    found = (after[0] - before[0]) / (after[1] - before[1])
    return round(found) if 1 <= found <= _MOST_KV else None


def _limits(info: EngineInfo, options: CalibrateOptions, seconds: float) -> ExperimentLimits:
    kv_tokens = None
    if info.num_gpu_blocks is not None and info.block_size is not None:
        kv_tokens = info.num_gpu_blocks * info.block_size
    length = min(info.max_model_len or _USUAL_LENGTH, MOST)
    return ExperimentLimits(length, kv_tokens, options.max_num_seqs, options.budget, seconds)


def _profile(
    options: CalibrateOptions,
    info: EngineInfo,
    limits: ExperimentLimits,
    measured: Measured,
    found: Fitted,
    notes: list[str],
) -> Profile:
    assumed = [*notes, *measured.notes, *found.assumed]
    if not measured.complete:
        assumed.append(
            "the time was not enough for all trials (--max-seconds): fewer values, wider ranges"
        )
    prompts = [row.tokens for row in measured.alone]
    prompts = prompts + [row.tokens for row in measured.chunks] or [0]
    longest = max(prompts)
    budget = measured.budget
    if budget is None:
        budget = measured.budget_most or max(_USUAL_BUDGET, longest + 1)
        assumed.append(
            f"max_num_batched_tokens = {budget}: {measured.budget_note} "
            f"(--max-num-batched-tokens says it)"
        )
    elif measured.budget_note.startswith("assumed"):
        assumed.append(f"max_num_batched_tokens = {budget}: {measured.budget_note}")
    if options.max_num_seqs is None:
        assumed.append(
            f"max_num_seqs = {EngineLimits().max_num_seqs}: an engine does not say it "
            f"(--max-num-seqs)"
        )
    if info.max_model_len is None:
        assumed.append(f"max_model_len = {limits.max_model_len}: the engine does not say it")
    block_size = min(info.block_size or EngineLimits().block_size, MOST)
    needed = -(-limits.max_model_len // block_size) + 1
    blocks = info.num_gpu_blocks
    if blocks is None or info.block_size is None:
        blocks = 4 * needed
        assumed.append(
            f"num_gpu_blocks = {blocks} of {block_size} tokens: the engine does not say how much "
            f"KV it holds"
        )
    what = (
        "one engine" if options.pair is None else f"a pair with connector {options.pair.connector}"
    )
    try:
        return Profile(
            name=options.name,
            origin=Origin(
                accelerator=options.accelerator,
                model=info.model,
                engine=f"vLLM {info.version}" if info.version else "unknown",
                measured=f"{datetime.now(UTC):%Y-%m-%d}, pdproxy calibrate: {len(measured.trials)} "
                f"trials, {what}",
                missing=["prefix caches, preemption"],
                spread={name: (one.low, one.high) for name, one in found.spreads.items()},
                assumed=assumed,
            ),
            engine=EngineLimits(
                block_size=block_size,
                num_gpu_blocks=min(max(blocks, needed), MOST),
                max_model_len=limits.max_model_len,
                max_num_seqs=options.max_num_seqs or EngineLimits().max_num_seqs,
                max_num_batched_tokens=min(budget, MOST),
            ),
            hardware=found.hardware,
            fitted=FittedRanges(
                prompt_tokens=(min(prompts), longest),
                sequences=(0, max((row.streams for row in measured.decodes), default=0)),
                context_tokens=(0, max((row.context for row in measured.decodes), default=0)),
                chunk=(min(prompts), budget),
            ),
        )
    except ValueError as error:
        raise TrialError(f"what the engine says of itself makes no profile: {error}") from None
