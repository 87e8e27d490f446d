"""Trials on virtual engines with a profile: what they should have shown, if the profile were
right.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from pdproxy_lab.calibrate.trials import BESIDE_AFTER, Seen, Trial, TrialError, TrialPrompt
from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.request import EngineOutput, EngineRequest, SamplingParams
from pdproxy_lab.sim.virtual import VirtualCluster, VirtualEngine

_SPARE_BLOCKS = 64
_TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}


def seen_of(trial: Trial, options: dict[str, Any], *, split: bool = False) -> Seen:
    """Return what a client sees of a trial on an engine with these fields of `SimFacts`.

    `split`: prompts beside streams go through another such engine first, which prefills them; the
    streams don't.

    Raises:
        TrialError: the engine could not serve it.
    """
    # A request that never fits would be preempted without end.
    longest = max(
        (trial.prompt_tokens + trial.output_tokens, *(tokens + 1 for tokens in trial.beside))
    )
    if longest > options["max_model_len"]:
        raise TrialError("an engine with these limits can't serve it")
    run = _Run(trial, _small(trial, options), split)
    if split:
        run.meet()
    return run.seen()


def _small(trial: Trial, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options with no more KV blocks than the trial may need: a measured engine may
    claim any number of them.
    """
    facts = SimFacts(**options)
    whole = -(-facts.max_model_len // facts.block_size) + 1
    needed = 2 * (
        trial.tokens // facts.block_size + trial.streams + len(trial.beside) + _SPARE_BLOCKS
    )
    return options | {"num_gpu_blocks": min(facts.num_gpu_blocks, max(whole, needed))}


class _Run:
    def __init__(self, trial: Trial, options: dict[str, Any], split: bool) -> None:
        self._trial = trial
        facts = SimFacts(enable_prefix_caching=False, eos_every=0, **options)
        self._hardware = facts.hardware
        self._cluster = VirtualCluster()
        self._engine = self._cluster.add(facts)
        self._prefill = self._cluster.add(facts) if split else None
        self._streams: list[list[float]] = [[] for _ in range(trial.streams)]
        self._sent: list[float] = []
        self._answered: dict[int, float] = {}
        self._prefilled: list[float] = []
        self._waiting = trial.streams
        self._failed = False
        self._count = 0

    def meet(self) -> None:
        """Let the engines know each other, as they do after the first prompt."""
        self._beside(0, 64, lambda _: None)
        self._cluster.run()
        self._prefilled.clear()

    def seen(self) -> Seen:
        """Carry the trial out."""
        trial, begin = self._trial, self._cluster.now
        for times in self._streams:
            self._whole(self._engine, trial.prompt_tokens, trial.output_tokens, self._noting(times))
        if not trial.streams:
            self._all_beside()
        self._cluster.run()
        done = all(len(times) == trial.output_tokens for times in self._streams)
        if self._failed or not done or len(self._answered) < len(trial.beside):
            raise TrialError("an engine with these limits can't serve it")
        prompts = [
            TrialPrompt(sent - begin, self._answered[place] - begin)
            for place, sent in enumerate(self._sent)
        ]
        streams = tuple(tuple(time - begin for time in times) for times in self._streams)
        return Seen(
            streams, tuple(prompts), min(self._prefilled) - begin if self._prefilled else None
        )

    def _noting(self, times: list[float]) -> Callable[[float], None]:
        def note(now: float) -> None:
            times.append(now)
            if len(times) == BESIDE_AFTER:
                self._waiting -= 1
                if not self._waiting:
                    self._all_beside()

        return note

    def _all_beside(self) -> None:
        for place, tokens in enumerate(self._trial.beside):
            self._sent.append(self._cluster.now)
            self._beside(place, tokens, partial(self._answered.__setitem__, place))

    def _beside(self, place: int, tokens: int, answered: Callable[[float], None]) -> None:
        if self._prefill is None:
            self._whole(self._engine, tokens, 1, answered)
            return
        prompt = self._prompt(tokens)

        def prefilled(output: EngineOutput, now: float) -> None:
            if output.kv_transfer_params is None:
                self._failed = True
                return
            handle = output.kv_transfer_params
            self._prefilled.append(now)
            self._cluster.at(
                now + self._hardware.between_engines_s,
                lambda: self._submit(self._engine, prompt, 1, handle, self._visible(answered)),
            )

        prefill = self._prefill
        self._cluster.at(
            self._cluster.now + self._hardware.before_engine_s,
            lambda: self._submit(prefill, prompt, 1, dict(_TO_DECODE), prefilled),
        )

    def _whole(
        self, engine: VirtualEngine, tokens: int, output: int, seen: Callable[[float], None]
    ) -> None:
        prompt = self._prompt(tokens)
        self._cluster.at(
            self._cluster.now + self._hardware.before_engine_s,
            lambda: self._submit(engine, prompt, output, None, self._visible(seen)),
        )

    def _visible(self, seen: Callable[[float], None]) -> Callable[[EngineOutput, float], None]:
        def listen(one: EngineOutput, now: float) -> None:
            self._failed = self._failed or one.finish_reason not in (None, "length")
            visible = now + self._hardware.to_client_s
            self._cluster.at(visible, lambda: seen(visible))

        return listen

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        self._count += 1
        return (self._count,) * tokens

    def _submit(
        self,
        engine: VirtualEngine,
        prompt: tuple[int, ...],
        output: int,
        params: dict[str, Any] | None,
        listener: Callable[[EngineOutput, float], None],
    ) -> None:
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        self._count += 1
        request = EngineRequest(
            id=f"r{self._count}", prompt=prompt, sampling=sampling, kv_transfer_params=params
        )
        self._cluster.submit(engine, request, listener)
