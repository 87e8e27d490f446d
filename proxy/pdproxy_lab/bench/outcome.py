"""What happened to one request, and in one run: times in seconds from the start of its run."""

from __future__ import annotations

import msgspec

from pdproxy_lab.bench.errors import one_line

_MAX_TEXT = 200


class Outcome(msgspec.Struct, kw_only=True):
    """One request. It has failed if `error` is not None; `times` then has the events that came
    before.
    """

    due: float
    """When it should have been sent."""
    asked_input: int
    """Tokens of the prompt; 0: nobody has counted them."""
    asked_output: int
    """Tokens that were asked for."""
    sent: float = 0.0
    """When its sending began."""
    end: float = 0.0
    """When it was over."""
    times: list[float] = []
    """When events with tokens came."""
    prompt_tokens: int | None = None
    """As the server counted; None: it did not."""
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, found in a cache, as the server counted; None: it did not."""
    class_name: str | None = None
    """The class of requests that it is of."""
    decision: str | None = None
    """What the server says of the engines that it chose; None: nothing."""
    answered: bool = False
    """Whether the head of an answer has come."""
    error: str | None = None
    """The kind: `connection`, `status 503`, `timeout`, `stream` (broken), `error event`, `cut` (the
    run was stopped).
    """
    text: str = ""
    """What is known of the error."""

    def fail(self, kind: str, text: str) -> None:
        """Note an error; the first one stays."""
        if self.error is None:
            self.error = kind
            self.text = one_line(text, _MAX_TEXT)

    @property
    def lag(self) -> float:
        """Seconds by which it was sent late."""
        return self.sent - self.due

    @property
    def ttft(self) -> float | None:
        """Seconds from when it was due until the first token."""
        return self.times[0] - self.due if self.times else None

    @property
    def e2e(self) -> float | None:
        """Seconds from when it was due until the last token."""
        return self.times[-1] - self.due if self.times else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one. None: one token alone, or the number of tokens is
        not known.
        """
        if not self.times or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between events that follow each other."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def worst_gap(self) -> float | None:
        """The longest of them. None: one event alone."""
        return max(self.gaps, default=None)


class Observed(msgspec.Struct, kw_only=True):
    """What a run has shown."""

    outcomes: list[Outcome]
    """Of the requests that were sent, in the order in which they were due."""
    loop_lags: list[float]
    """Seconds by which timers of this process were late, sampled."""
    seconds: float
    """From the start until the last answer has ended."""
    cut: bool = False
    """Whether it was stopped before its end."""
    given_up: str = ""
    """Why nothing of it may be used, such as too many requests in flight; empty: all may be."""
    most_in_flight: int = 0
