"""Engines in virtual time, asked in one line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdproxy_lab.sim.facts import SimFacts
from pdproxy_lab.sim.request import EngineOutput, EngineRequest, SamplingParams
from pdproxy_lab.sim.virtual import VirtualCluster, VirtualEngine
from pdproxy_lab.sim.watched import WatchedEngine

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
PROMPT = tuple(range(300, 400))
OTHER = tuple(range(400, 500))


@dataclass
class Run:
    """What became of one request."""

    outputs: list[EngineOutput] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [token.id for output in self.outputs for token in output.tokens]

    @property
    def over(self) -> str | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def handle(self) -> dict[str, Any]:
        found = self.outputs[-1].kv_transfer_params
        assert found is not None
        return dict(found)


class Engines(VirtualCluster):
    """A cluster with requests that number themselves."""

    def ask(
        self,
        engine: VirtualEngine,
        prompt: tuple[int, ...] = PROMPT,
        max_tokens: int = 8,
        kv: dict[str, Any] | None = None,
        *,
        id: str | None = None,  # noqa: A002
        priority: int = 0,
        cache_salt: str | None = None,
        temperature: float = 0.0,
        ignore_eos: bool = True,
        **sampling: Any,
    ) -> Run:
        """Start a request; see what became of it after `run`."""
        run = Run()
        self._count += 1
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos, **sampling
        )
        request = EngineRequest(
            id=id or f"request-{self._count}",
            prompt=prompt,
            sampling=params,
            kv_transfer_params=kv,
            priority=priority,
            cache_salt=cache_salt,
        )

        def listen(output: EngineOutput, now: float) -> None:
            run.outputs.append(output)
            run.times.append(now)

        self.submit(engine, request, listen)
        return run

    def answer(
        self, engine: VirtualEngine, prompt: tuple[int, ...] = PROMPT, *args: Any, **more: Any
    ) -> Run:
        """Run a request, and a second more."""
        run = self.ask(engine, prompt, *args, **more)
        self.run(self.now + 1)
        return run

    def handle(self, engine: VirtualEngine, prompt: tuple[int, ...] = PROMPT) -> dict[str, Any]:
        """Have a prompt prefilled; return P's handle."""
        return self.answer(engine, prompt, 1, dict(PREFILL)).handle


def external(engine: VirtualEngine | WatchedEngine) -> int:
    """Prompt tokens that an engine had from elsewhere."""
    return engine.stats.prompt_tokens_by_source["external_kv_transfer"]


def plain(prompt: tuple[int, ...] = PROMPT, max_tokens: int = 8, **facts: Any) -> list[int]:
    """What an engine alone says to a prompt."""
    engines = Engines()
    return engines.answer(engines.add(SimFacts(**facts)), prompt, max_tokens).tokens
