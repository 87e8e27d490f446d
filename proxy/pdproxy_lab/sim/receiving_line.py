"""KV transfers to one engine: how long the posting and the moving take, one behind the other where
the hardware has it so. Pure.

Owns until when the engine's step posts transfers, and until when its link is in use.
"""

from __future__ import annotations

from pdproxy.engine_model.hardware import Hardware

_TIE = 1e-9
"""Seconds. A pull that begins as the one before is posted is the first of a step: sums of floats
may differ in the last bit.
"""


class ReceivingLine:
    """The transfers to one engine. A step posts them in turn (`Hardware.pull_s`); then they
    move.
    """

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._posted = float("-inf")
        self._moved = float("-inf")

    def add(self, now: float, tokens: int) -> float:
        """Begin a transfer of so many tokens; return in how many seconds it has ended."""
        hardware = self._hardware
        if hardware.speed and (hardware.pull_s or hardware.further_pull_s or hardware.pull_token_s):
            posting = hardware.further_pull_s if self._posted > now + _TIE else hardware.pull_s
            posting += tokens * hardware.pull_token_s
            self._posted = max(self._posted, now) + posting / hardware.speed
        begins = max(self._posted, now)
        if hardware.transfers_in_line:
            begins = max(begins, self._moved)
        taken = begins - now + hardware.transfer_s(tokens)
        self._moved = now + taken
        return taken
