"""Limits of keys: requests at once, requests and tokens per minute.

Owns what each key has used. Minutes are buckets that fill steadily and hold one minute. A key with
an empty bucket is refused before the body is parsed. A request that was read reserves tokens: its
prompt, and the most that may be generated for it. If the bucket holds too few of them, the request
is refused. At the end, what was used takes the place of what was reserved; if that was more, the
bucket may be in debt, and the key waits until that is paid. An engine may report anything: no
request costs more than ten minutes, unless it may use more by its own size and limit. What a key
has used is kept by its name, so that a changed file of keys gives nobody a new minute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdproxy.kit.errors import LimitError, RefusalReason
from pdproxy.settings.keys import KeyLimits

_MINUTE = 60.0
WITHOUT_LIMIT = 4
"""How many requests that name no limit may run at once: each reserves such a part of the key's
minute.
"""
MOST_MINUTES = 10
"""Minutes of its key that a request costs at most, unless its own size and limit are more: engines
may report any number.
"""
_BYTES_PER_TOKEN = 4
"""As estimates of prompts have it. No text has more tokens than bytes."""
_SOON = 1.0
"""Seconds after which a refused request may be tried again, if requests that run have reserved what
it needs.
"""
_ROUNDED = 1e-3
"""Tokens that a bucket may miss: its level is no whole number."""


class Bucket:
    """So much per minute. `level`: what is left, below 0 for a debt."""

    __slots__ = ("level", "per_minute", "since")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self.level = float(per_minute)
        self.since = now

    def fill(self, now: float) -> None:
        """Add what has come since the last call."""
        self.level = min(
            self.level + (now - self.since) * self.per_minute / _MINUTE, float(self.per_minute)
        )
        self.since = now

    def seconds_until(self, level: float) -> float:
        """Return when it will have filled to a level."""
        return (level - self.level) * _MINUTE / self.per_minute


class Account:
    """What the keys of one name have used."""

    __slots__ = ("elsewhere", "inflight", "limits", "requests", "reserved", "tokens")

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.inflight = 0
        self.elsewhere = 0
        """Requests that other workers serve."""
        self.reserved = 0.0
        """Tokens that its requests in this process have reserved."""
        self.limits = limits
        self.requests = Bucket(limits.rpm, now) if limits.rpm is not None else None
        self.tokens = Bucket(limits.tpm, now) if limits.tpm is not None else None

    def check_tokens(self, needed: float) -> None:
        """Check that the minute still has the tokens that a request needs. Its bucket was filled.

        Raises:
            LimitError: it has fewer.
        """
        tokens = self.tokens
        if tokens is not None and tokens.level < needed - _ROUNDED:
            seconds = tokens.seconds_until(needed)
            if tokens.level + self.reserved >= needed:
                seconds = min(seconds, _SOON)
            text = f"this key may use {tokens.per_minute} tokens per minute"
            raise LimitError(text, RefusalReason.KEY_TOKENS, retry_after=seconds)

    def change(self, limits: KeyLimits, now: float) -> None:
        """Follow changed limits: what was used counts on."""
        self.limits = limits
        self.requests = _changed(self.requests, limits.rpm, now)
        self.tokens = _changed(self.tokens, limits.tpm, now)


def _changed(bucket: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now)
    bucket.fill(now)
    bucket.level += per_minute - bucket.per_minute
    bucket.per_minute = per_minute
    return bucket


class Use:
    """One request's use of its key's limits. Ended by one call of `end`. `now` returns the time of
    the buckets.
    """

    __slots__ = ("_account", "_most", "_now", "_own", "_reserved", "_spent")

    def __init__(self, account: Account, now: Callable[[], float]) -> None:
        self._account = account
        self._now = now
        self._reserved = self._most = 0.0
        self._own = 0
        """The most tokens that the request may use by its own size and limit."""
        self._spent = 0

    def reserve(self, prompt: int, most: int | None, answers: int = 1) -> None:
        """Reserve the tokens of a prompt, and the most that may be generated for its answers; None:
        they have no limit.

        A request never reserves more than a whole minute; without a limit, a quarter of it, or its
        prompt. Of a prompt no more than a quarter must be left: a picture has many bytes and few
        tokens, and would wait for an idle minute. The bucket is in debt then, so that only one such
        request runs. Who leaves before anything was seen pays a quarter for each answer.

        Raises:
            LimitError: the key's minute has fewer tokens left.
        """
        account = self._account
        tokens = account.tokens
        if tokens is None:
            return
        self._own = _BYTES_PER_TOKEN * prompt + (most or 0)
        minute = float(tokens.per_minute)
        part = minute / WITHOUT_LIMIT
        self._most = (
            min(part * answers, minute) if most is None else float(min(most, tokens.per_minute))
        )
        reserved = min(max(part, prompt) if most is None else self._most + prompt, minute)
        tokens.fill(self._now())
        account.check_tokens(part if most is None else min(self._most + min(prompt, part), minute))
        tokens.level -= reserved
        account.reserved += reserved
        self._reserved = reserved

    def spend(self, tokens: int) -> None:
        """Charge tokens now, of a request without an end in sight: what it reserves grows with what
        it has used.

        Raises:
            LimitError: the key's minute has none left.
        """
        bucket = self._account.tokens
        if bucket is None:
            return
        self._spent += tokens
        more = self._spent - self._reserved
        if more > 0:
            self._grow(bucket, more)
            self._account.check_tokens(0.0)

    def _grow(self, bucket: Bucket, more: float) -> None:
        bucket.fill(self._now())
        bucket.level -= more
        self._account.reserved += more
        self._reserved += more
        self._own = max(self._own, self._spent)

    def end(self, tokens: int, unseen: float = 0.0, seen: int = 0) -> None:
        """End the use. `tokens`: those that the request has used, as far as they were seen.

        `unseen`: the part of its answers that nobody has seen to the end. The most that may have
        been generated for these counts, and not the tokens that were `seen` of these.
        """
        self._account.inflight -= 1
        self._account.reserved -= self._reserved
        if self._account.tokens is not None:
            self._account.tokens.level -= self._used(tokens, unseen, seen) - self._reserved

    def add(self, tokens: int) -> None:
        """Charge tokens that became known behind the end."""
        if self._account.tokens is not None:
            self._account.tokens.level -= self._used(tokens)

    def _used(self, tokens: int, unseen: float = 0.0, seen: int = 0) -> float:
        used = tokens + max(unseen * self._most - seen, 0.0)
        bucket = self._account.tokens
        return (
            used if bucket is None else min(used, max(self._own, MOST_MINUTES * bucket.per_minute))
        )


class Quotas:
    """The limits of all keys. `limits` returns those in force, by the name of the keys."""

    def __init__(
        self, limits: Callable[[], Mapping[str, KeyLimits]], now: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._now = now
        self._accounts: dict[str, Account] = {}
        self._seen: Mapping[str, KeyLimits] = {}

    def __repr__(self) -> str:
        return f"<Quotas of {len(self._accounts)} names>"

    def enter(self, key: str | None) -> Use | None:
        """Begin a request of a key; None if the key has no limits.

        Raises:
            LimitError: it is over one of them.
        """
        limits = self._limits()
        if limits is not self._seen:
            self._follow(limits)
        if key is None or (own := limits.get(key)) is None:
            return None
        account = self._account(key, own)
        if own.inflight is not None and account.inflight + account.elsewhere >= own.inflight:
            raise LimitError(
                f"{own.inflight} requests of this key are being served", RefusalReason.KEY_INFLIGHT
            )
        now = self._now()
        requests, tokens = account.requests, account.tokens
        if tokens is not None:
            tokens.fill(now)
            account.check_tokens(1.0)
        if requests is not None:
            requests.fill(now)
            if requests.level < 1:
                text = f"this key may send {requests.per_minute} requests per minute"
                raise LimitError(
                    text, RefusalReason.KEY_REQUESTS, retry_after=requests.seconds_until(1.0)
                )
            requests.level -= 1
        account.inflight += 1
        return self._begun(key, account)

    def _begun(self, key: str, account: Account) -> Use:
        return Use(account, self._now)

    def _account(self, key: str, own: KeyLimits) -> Account:
        """Return the account of a name."""
        account = self._accounts.get(key)
        if account is None:
            account = self._accounts[key] = Account(own, self._now())
        return account

    def _follow(self, limits: Mapping[str, KeyLimits]) -> None:
        """Follow limits that have changed. A name that is gone is forgotten once it has no
        requests.
        """
        now = self._now()
        self._seen = limits
        for name, account in list(self._accounts.items()):
            if name in limits:
                account.change(limits[name], now)
            elif not account.inflight:
                del self._accounts[name]
