"""What one run of chaos is: the seed, how long, how much, with which engines."""

from __future__ import annotations

from typing import Literal

import msgspec

from pdproxy_lab.sim.facts import ConnectorName


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Times are virtual seconds."""

    seed: int = 0
    seconds: float = 60.0
    """How long load and faults last."""
    prefill: int = 3
    decode: int = 3
    encode: int = 0
    """Encoder engines. With some, every second chat, response and message has pictures."""
    connector: ConnectorName = "nixl"
    """How KV gets from prefill to decode engines."""
    notices: Literal["none", "notifier", "early"] = "none"
    """Whether engines of connector nixl have the notifier, and whether the decode engine is asked
    at the notice (`early`).
    """
    pool: Literal["roles", "any"] = "roles"
    """Whether engines have a role each, or all of them (`prefill` and `decode` together) any
    role.
    """
    workers: int = 1
    """How many processes serve clients. With several, one more is the scheduler process. All are
    in the one virtual loop.
    """
    rate: float = 8.0
    """Requests per second."""
    faults: float = 1.5
    """Faults per second."""
    only: frozenset[int] | None = None
    """Numbers of the items that happen; None: all."""

    def command(self, only: frozenset[int] | None = None) -> str:
        """Return the command line that repeats the run, with these items only."""
        words = ["python -m tests.chaos", f"--seed {self.seed}", f"--seconds {self.seconds:g}"]
        usual = Options()
        for name in (
            "prefill",
            "decode",
            "encode",
            "connector",
            "notices",
            "pool",
            "workers",
            "rate",
            "faults",
        ):
            value = getattr(self, name)
            if value != getattr(usual, name):
                words.append(
                    f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
                )
        chosen = only if only is not None else self.only
        if chosen is not None:
            words.append(f"--only {','.join(map(str, sorted(chosen)))}")
        return " ".join(words)
