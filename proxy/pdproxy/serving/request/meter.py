"""The meter of one request: how many tokens its prompts had, and how many engines have generated
for it.

Owns the rule. What an engine reports counts. Without a report, the answer counts as far as it was
seen: by the token ids in its stream, else by its events; and the prompt counts as the prefill
engine has reported it, else by its size. An answer that is not streamed shows nothing before its
end: if its client leaves before that, the answer is `unseen`.
"""

from __future__ import annotations

import msgspec

from pdproxy.kit.errors import (
    AnswerBudgetError,
    AnswerTooLargeError,
    ClientLeftError,
    Fault,
    PdproxyError,
    RevokedError,
)
from pdproxy.scheduling.admission import BYTES_PER_TOKEN, MOST_TOKENS, RequestDemand
from pdproxy.serving.dispatch.exchange import Exchange
from pdproxy.serving.dispatch.following import Streams
from pdproxy.serving.kv.custody import Custody


class Meter(msgspec.Struct, eq=False):
    """What one request has used, in tokens. Owned by one `RequestTotals`.

    `asked`: whether an engine was asked for anything that counts. `measured`: whether an engine has
    reported its usage, or some of the answer was seen. `unseen`: how many answers an engine was
    asked for and that ended before any of them was seen, or whose client did not read what had
    come; `seen`: the tokens of these that were seen. `lost`: those that were cut since a later
    prompt of their list was wrong. `prefilled`: whether a prefill engine has reported a prompt,
    which it has computed then. `later`: the custody of prompts that prefill engines still compute,
    though the request has ended.
    """

    prompt: int = 0
    completion: int = 0
    unseen: int = 0
    seen: int = 0
    lost: int = 0
    asked: bool = False
    measured: bool = False
    prefilled: bool = False
    later: tuple[Custody, ...] = ()

    def add(
        self, exchange: Exchange, streams: Streams, prompt: int, answers: int, most: int = 1
    ) -> None:
        """Add what an exchange with these streams has used, and count how it was served. `prompt`:
        the likely tokens of its prompt.

        `answers`: how many answers it was asked for that show nothing before their end; 0 for a
        stream. `most`: how many answers a stream has.
        """
        usage = streams.usage
        if usage is not None:
            prompt = max(usage.prompt_tokens - streams.done, 0)
            self.report(prompt, (usage.completion_tokens or 0) + streams.done)
        elif exchange.was_asked:
            last = streams.paths[-1] if streams.paths else None
            seen = 0 if last is None else streams.done + (last.tokens or last.events)
            # Engines make their tokens also if nobody reads them.
            unread = exchange.relay is not None and exchange.relay.paused
            if counted := exchange.prefilled:
                self.prefilled = True
                prompt = counted
            unseen = (answers or most if unread else answers) if exchange.may_be_answered else 0
            self.see(prompt, seen, unseen, unread=unread)
        else:
            return
        exchange.resources.shares.add(prompt, exchange.tried)

    def refuse(self, exchange: Exchange) -> None:
        """Add an exchange that an engine has refused as wrong: its prompt, if a prefill engine has
        computed it before that.

        The client chooses what only the decode engine reads, and so could have prompts computed for
        nothing. A prompt that the prefill engine still computes is known behind the request's end.
        """
        if exchange.later is not None:
            self.later += (exchange.later,)
        elif counted := exchange.prefilled:
            self.prompt += counted
            self.asked = self.prefilled = True

    def report(self, prompt: int, completion: int) -> None:
        """Add what an engine reports."""
        self.prompt += prompt
        self.completion += completion
        self.asked = self.measured = True

    def see(self, prompt: int, completion: int, unseen: int = 0, *, unread: bool = False) -> None:
        """Add what is known of a request without a report. `unread`: there is more than was
        seen.
        """
        self.prompt += prompt
        self.completion += completion
        if completion:
            self.measured = True
        if unread or not completion:
            self.unseen += unseen
            self.seen += completion
        self.asked = True

    def end(
        self, error: PdproxyError, demand: RequestDemand, *, sent: bool, own_limit: bool
    ) -> None:
        """Keep what the client pays for.

        `demand`: what it has asked for; `sent`: whether a part of the answer was sent to it. A
        client that leaves, whose key is taken away, or whose own time limit ends the request
        (`own_limit`), pays for what was made. So does one whose answer is too large. One whose
        answer found no space pays for as much of the answer as had come, by its bytes, and for no
        more than it has asked for; without a limit, as one that leaves. For a request that is
        wrong: see `end_wrong`. Of any other failure before the answer, a client pays for the
        prompt.
        """
        if (
            sent
            or own_limit
            or isinstance(error, ClientLeftError | RevokedError | AnswerTooLargeError)
        ):
            return
        if error.fault is Fault.CLIENT:
            self.end_wrong()
        else:
            self.seen = self.lost = 0
            if not isinstance(error, AnswerBudgetError):
                self.unseen = self.completion = 0
            elif demand.most is not None:  # else its bytes say too little: as of one that leaves
                self.unseen = 0
                held = self.completion + error.held // BYTES_PER_TOKEN
                self.completion = max(self.completion, min(held, demand.most))
            self.measured = self.completion > 0

    def end_wrong(self) -> None:
        """Keep what the client pays for a request that is wrong: nothing, unless engines have
        worked on it.

        A prompt that was prefilled is paid, whoever refused it then. If one prompt of a list was
        refused, so are the others that engines were asked for: their prefills go on. So are answers
        that were begun before: nobody has seen how far they were.
        """
        self.unseen, self.seen = self.lost, 0
        if not (self.measured or self.prefilled or self.lost):
            self.prompt = 0
            self.asked = False

    def bound(self, demand: RequestDemand) -> None:
        """Take no more tokens from engines' reports than the request may have used: a defect must
        not take a key's share away.
        """
        if self.prompt > demand.longest:
            self.prompt = demand.longest
        answers = (demand.answers or 1) * demand.best_of
        # a response that calls tools has its limit several times
        most = max(demand.limit or 0, MOST_TOKENS) * answers
        if self.completion > most:
            self.completion = most
