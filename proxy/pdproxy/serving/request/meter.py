"""The meter of one request: how many tokens its prompts had, and how many engines have generated for it.

Owns the rule. What an engine reports counts. Without a report, the answer counts as far as it was seen: by the token ids in its
stream, else by its events; and the prompt counts as the prefill engine has reported it, else by its size. An answer that is not
streamed shows nothing before its end: if its client leaves before that, the answer is `unseen`.
"""

from __future__ import annotations

import msgspec

from pdproxy.kit.errors import ClientLeftError, Fault, PdproxyError, RevokedError
from pdproxy.serving.dispatch.exchange import Exchange
from pdproxy.serving.dispatch.following import Streams


class Meter(msgspec.Struct, eq=False):
    """What one request has used, in tokens. Owned by one `RequestTotals`.

    `asked`: whether an engine was asked for anything that counts. `measured`: whether an engine has reported its usage, or some
    of the answer was seen. `unseen`: how many answers an engine was asked for and that ended before any of them was seen.
    """

    prompt: int = 0
    completion: int = 0
    unseen: int = 0
    asked: bool = False
    measured: bool = False

    def add(self, exchange: Exchange, streams: Streams, prompt: int, answers: int) -> None:
        """Add what an exchange with these streams has used. `prompt`: the likely tokens of its prompt.

        `answers`: how many answers it was asked for that show nothing before their end; 0 for a stream.
        """
        usage = streams.usage
        if usage is not None:
            self.report(usage.prompt_tokens - streams.done, (usage.completion_tokens or 0) + streams.done)
        elif exchange.was_asked:
            last = streams.paths[-1] if streams.paths else None
            seen = 0 if last is None else streams.done + (last.tokens or last.events)
            self.see(exchange.prompt_tokens or prompt, seen, answers if exchange.may_be_answered else 0)

    def report(self, prompt: int, completion: int) -> None:
        """Add what an engine reports."""
        self.prompt += prompt
        self.completion += completion
        self.asked = self.measured = True

    def see(self, prompt: int, completion: int, unseen: int = 0) -> None:
        """Add what is known of a request without a report."""
        self.prompt += prompt
        self.completion += completion
        if completion:
            self.measured = True
        else:
            self.unseen += unseen
        self.asked = True

    def end(self, error: PdproxyError, *, sent: bool, own_limit: bool) -> None:
        """Keep what the client pays for. `sent`: whether a part of the answer was sent to it.

        A client that leaves, whose key is taken away, or whose own time limit ends the request (`own_limit`), pays for what was
        made. A client whose request is wrong pays nothing; if only a prompt of its list is wrong, it pays for the others, as far
        as these are known. Of any other failure before the answer, a client pays for the prompt.
        """
        if sent or own_limit or isinstance(error, ClientLeftError | RevokedError):
            return
        self.unseen = 0
        if error.fault is not Fault.CLIENT:
            self.completion = 0
            self.measured = False
        elif not self.measured:
            self.prompt = 0
            self.asked = False
