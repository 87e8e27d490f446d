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

import msgspec

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

    def is_full(self, now: float) -> bool:
        """Return whether it holds a whole minute by now."""
        return self.seconds_until(self.per_minute) <= now - self.since

    def seconds_until(self, level: float) -> float:
        """Return when it will have filled to a level."""
        return (level - self.level) * _MINUTE / self.per_minute


class Account:
    """What the keys of one name have used."""

    __slots__ = ("inflight", "limits", "requests", "reserved", "tokens")

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.inflight = 0
        self.reserved = 0.0
        """Tokens that its requests have reserved."""
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

    def bounded(self, used: float, own: int) -> float:
        """Return how much of what a request has used counts. `own`: see `most_of`."""
        tokens = self.tokens
        return used if tokens is None else min(used, max(own, MOST_MINUTES * tokens.per_minute))

    def charge(self, tokens: int, own: int) -> None:
        """Charge tokens that became known behind the end of a request. `own`: see `most_of`."""
        if self.tokens is not None:
            self.tokens.level -= self.bounded(tokens, own)

    def is_as_new(self, now: float) -> bool:
        """Return whether nothing would change if it was made anew."""
        buckets = (self.requests, self.tokens)
        return not self.inflight and all(one is None or one.is_full(now) for one in buckets)

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


class Levels(msgspec.Struct, array_like=True, frozen=True):
    """The levels of a name's two buckets, each with the time when it had filled to that; None: it
    has no such limit. Of tokens what requests in flight have reserved is left.
    """

    requests: tuple[float, float] | None
    tokens: tuple[float, float] | None


encode_levels = msgspec.msgpack.Encoder().encode
decode_levels = msgspec.msgpack.Decoder(dict[str, Levels]).decode


def _level(bucket: Bucket | None, reserved: float = 0.0) -> tuple[float, float] | None:
    return None if bucket is None else (bucket.level + reserved, bucket.since)


def _go_on(bucket: Bucket | None, level: tuple[float, float] | None) -> None:
    if bucket is not None and level is not None:
        bucket.level, bucket.since = level


class LocalUse:
    """A `Use`. `now` returns the time of the buckets."""

    __slots__ = ("_account", "_most", "_now", "_own", "_reserved", "_spent")

    def __init__(self, account: Account, now: Callable[[], float]) -> None:
        self._account = account
        self._now = now
        self._reserved = self._most = 0.0
        self._own = 0
        """The most tokens that the request may use by its own size and limit."""
        self._spent = 0

    async def reserve(self, prompt: int, most: int | None, answers: int = 1) -> None:
        """See `Use`, and `take`."""
        self.take(prompt, most, answers)

    def take(self, prompt: int, most: int | None, answers: int = 1, *, check: bool = True) -> None:
        """Reserve tokens as `reserve`, whatever is left if not `check`.

        A request never reserves more than a whole minute; without a limit, a quarter of it, or its
        prompt. Of a prompt no more than a quarter must be left: a picture has many bytes and few
        tokens, and would wait for an idle minute. The bucket is in debt then, so that only one such
        request runs. Who leaves before anything was seen pays a quarter for each answer.
        """
        account = self._account
        tokens = account.tokens
        if tokens is None:
            return
        self._own = most_of(prompt, most)
        minute = float(tokens.per_minute)
        part = minute / WITHOUT_LIMIT
        self._most = (
            min(part * answers, minute) if most is None else float(min(most, tokens.per_minute))
        )
        reserved = min(max(part, prompt) if most is None else self._most + prompt, minute)
        if check:
            tokens.fill(self._now())
            needed = part if most is None else min(self._most + min(prompt, part), minute)
            account.check_tokens(needed)
        tokens.level -= reserved
        account.reserved += reserved
        self._reserved = reserved

    def spend(self, tokens: int) -> None:
        """See `Use`. What it reserves grows with what it has used."""
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
        """See `Use`."""
        self._account.inflight -= 1
        self._account.reserved -= self._reserved
        if self._account.tokens is not None:
            self._account.tokens.level -= self._used(tokens, unseen, seen) - self._reserved

    def forfeit(self) -> None:
        """End the use of a request that is lost: what it reserved is what it has used."""
        self._account.inflight -= 1
        self._account.reserved -= self._reserved

    def add(self, tokens: int) -> None:
        """See `Use`."""
        self._account.charge(tokens, self._own)

    def _used(self, tokens: int, unseen: float, seen: int) -> float:
        return self._account.bounded(tokens + max(unseen * self._most - seen, 0.0), self._own)


def most_of(prompt: int, most: int | None) -> int:
    """Return the most tokens that a request may use by its own size and limit. The arguments: see
    `Use.reserve`.
    """
    return _BYTES_PER_TOKEN * prompt + (most or 0)


class LocalQuotas:
    """The limits of all keys. `limits` returns those in force, by the name of the keys."""

    def __init__(
        self, limits: Callable[[], Mapping[str, KeyLimits]], now: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._now = now
        self._accounts: dict[str, Account] = {}
        self._seen: Mapping[str, KeyLimits] = {}

    def __repr__(self) -> str:
        return f"<LocalQuotas of {len(self._accounts)} names>"

    async def enter(self, key: str) -> LocalUse | None:
        """See `Quotas`, and `begin`."""
        return self.begin(key)

    def begin(self, key: str) -> LocalUse | None:
        """Begin a request as `enter`."""
        own = self._limits_of(key)
        if own is None:
            return None
        account = self._account(key, own)
        if own.inflight is not None and account.inflight >= own.inflight:
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
        return LocalUse(account, self._now)

    def restore(self, key: str) -> LocalUse | None:
        """Return the use of a request that another process has let begin, and that goes on."""
        own = self._limits_of(key)
        if own is None:
            return None
        account = self._account(key, own)
        account.inflight += 1
        return LocalUse(account, self._now)

    def charge(self, key: str, tokens: int, own: int) -> None:
        """Charge tokens that became known behind the end of a request. `own`: see `most_of`."""
        account, limits = self._accounts.get(key), self._limits_of(key)
        if account is None and limits is not None:
            account = self._account(key, limits)
        if account is not None:
            account.charge(tokens, own)

    def forget_unused(self) -> None:
        """Forget what is as new: of the names of thousands of keys few are in use."""
        now = self._now()
        for name in [name for name, one in self._accounts.items() if one.is_as_new(now)]:
            del self._accounts[name]

    def levels(self) -> dict[str, Levels]:
        """Return the levels of names that have used some of theirs."""
        return {
            name: Levels(_level(account.requests), _level(account.tokens, account.reserved))
            for name, account in self._accounts.items()
            if account.requests is not None or account.tokens is not None
        }

    def take_over(self, levels: Mapping[str, Levels]) -> None:
        """Go on from the levels that another process had."""
        for name, level in levels.items():
            if (own := self._limits_of(name)) is not None:
                account = self._account(name, own)
                _go_on(account.requests, level.requests)
                _go_on(account.tokens, level.tokens)

    def _limits_of(self, key: str) -> KeyLimits | None:
        limits = self._limits()
        if limits is not self._seen:
            self._follow(limits)
        return limits.get(key)

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
