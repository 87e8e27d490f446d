"""Trials on a virtual engine with a profile: what the engine should have shown, if the profile were right."""

from __future__ import annotations

from typing import Any

from pdproxy.lab.calibrate.trials import BESIDE_AFTER, Prompt, Seen, Trial, TrialError
from pdproxy.sim.facts import Facts
from pdproxy.sim.request import EngineOutput, EngineRequest, SamplingParams
from pdproxy.sim.virtual import VirtualCluster


def seen_of(trial: Trial, options: dict[str, Any]) -> Seen:
    """Return what a client sees of a trial on an engine with these fields of `Facts`.

    Raises:
        TrialError: the engine could not serve it.
    """
    return _Run(trial, options).seen()


class _Run:
    def __init__(self, trial: Trial, options: dict[str, Any]) -> None:
        self._trial = trial
        facts = Facts(enable_prefix_caching=False, eos_every=0, **options)
        self._hardware = facts.hardware
        self._cluster = VirtualCluster()
        self._engine = self._cluster.add(facts)
        self._streams: list[list[float]] = [[] for _ in range(trial.streams)]
        self._sent: list[float] = []
        self._answered: dict[int, float] = {}
        self._waiting = trial.streams
        self._failed = False

    def seen(self) -> Seen:
        trial = self._trial
        for stream in range(trial.streams):
            self._send(stream, 0.0, trial.prompt_tokens, trial.output_tokens, self._streams[stream])
        if not trial.streams:
            self._beside()
        self._cluster.run()
        done = all(len(times) == trial.output_tokens for times in self._streams)
        if self._failed or not done or len(self._answered) < len(trial.beside):
            raise TrialError("an engine with these limits can't serve it")
        prompts = [Prompt(sent, self._answered[place]) for place, sent in enumerate(self._sent)]
        return Seen(tuple(map(tuple, self._streams)), tuple(prompts))

    def _beside(self) -> None:
        now = self._cluster.now
        for place, tokens in enumerate(self._trial.beside):
            self._sent.append(now)
            self._send(self._trial.streams + place, now, tokens, 1, None)

    def _send(self, number: int, now: float, tokens: int, output: int, times: list[float] | None) -> None:
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        request = EngineRequest(id=f"r{number}", prompt=(number,) * tokens, sampling=sampling)

        def listen(one: EngineOutput, at: float) -> None:
            self._failed = self._failed or one.finish_reason not in (None, "length")
            visible = at + self._hardware.to_client_s
            self._cluster.at(visible, lambda: self._visible(number, times, visible))

        self._cluster.at(
            now + self._hardware.before_engine_s, lambda: self._cluster.submit(self._engine, request, listen)
        )

    def _visible(self, number: int, times: list[float] | None, now: float) -> None:
        if times is None:
            self._answered[number - self._trial.streams] = now
            return
        times.append(now)
        if len(times) == BESIDE_AFTER:
            self._waiting -= 1
            if not self._waiting:
                self._beside()
