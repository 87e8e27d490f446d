"""Clients that send a body too slowly: a minimum speed, and a time for the whole body.

A body on a slow network is large and takes minutes. A client that sends a few bytes from time to
time holds a connection, and space for bodies, without end.
"""

from __future__ import annotations

from collections.abc import Callable

from pdproxy.kit.clock import Timer
from pdproxy.kit.errors import BodyTimeoutError
from pdproxy.web.connection_bounds import ConnectionBounds


class SendWatch:
    """Judges a body from time to time until it is cancelled. `received` returns the body's bytes so
    far; `refuse` ends it.
    """

    __slots__ = ("_before", "_bounds", "_by", "_received", "_refuse", "_timer")

    def __init__(
        self,
        bounds: ConnectionBounds,
        received: Callable[[], int],
        refuse: Callable[[BodyTimeoutError], None],
    ) -> None:
        self._bounds = bounds
        self._received = received
        self._refuse = refuse
        self._by = bounds.slow_readers.clock.now() + bounds.longest_body
        self._before = 0
        self._timer: Timer = self._judge_later()

    def cancel(self) -> None:
        """Judge no more."""
        self._timer.cancel()

    def _judge_later(self) -> Timer:
        clock = self._bounds.slow_readers.clock
        return clock.after(min(self._bounds.body_timeout, self._by - clock.now()), self._judge)

    def _judge(self) -> None:
        bounds, received = self._bounds, self._received()
        came, self._before = received - self._before, received
        if bounds.slow_readers.clock.now() >= self._by:
            self._refuse(
                BodyTimeoutError(
                    f"The body was not complete in {bounds.longest_body:g} s", param="body"
                )
            )
        elif came < max(1, bounds.min_send_rate * bounds.body_timeout):
            text = f"The body came too slowly: {came} bytes in {bounds.body_timeout:g} s"
            self._refuse(BodyTimeoutError(text, param="body"))
        else:
            self._timer = self._judge_later()
