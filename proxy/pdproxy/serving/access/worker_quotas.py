"""Limits of keys with several workers: what a key has used in all workers counts.

A key has two buckets, of requests and of tokens. A worker that uses a bucket takes over the newest
level that any worker has shown, and then shows the new level. If two workers did so within the same
microseconds, one of the two uses would be lost. So each worker also shows how much was used in that
worker since the start; and with a level, how much use of all workers the level contains. The next
worker that uses the bucket charges the use that is missing in the level. If all workers take the
last request of a bucket within the same microseconds, the limit is exceeded by as many requests as
there are other workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pdproxy.kit.shared_table import Column, Others, key_of
from pdproxy.serving.access.quotas import Account, Bucket, Quotas, Use
from pdproxy.settings.keys import KeyLimits

REQUESTS, TOKENS, INFLIGHT, REQUESTS_LEFT, TOKENS_LEFT, REQUESTS_SINCE, TOKENS_SINCE = range(7)
REQUESTS_LIMIT, TOKENS_LIMIT, REQUESTS_SEEN, TOKENS_SEEN, SHOWN = range(7, 12)
MEASURES = 12
"""Numbers of the table for each key's name: requests and tokens that were used in this worker, and
requests that are served; the levels of both buckets, since when these hold and for which limits (0:
none), the use in all workers that is charged to them, and when they were written. Times are in
nanoseconds.
"""
KEPT = frozenset(range(MEASURES)) - {INFLIGHT}
"""What stays when a worker is gone."""
_SCALE = 1_000_000
"""Tokens are counted in parts, since estimates are no whole numbers."""
_MOST = 1 << 62
"""A level, or a limit, that is more is shown as this."""
_WRAP = 1 << 64
"""Sums of use wrap at the size of a cell: only their differences are used."""


class _Used:
    """What one name has used in this worker."""

    __slots__ = ("key", "requests", "tokens")

    def __init__(self, key: int, before: Sequence[int]) -> None:
        self.key = key
        self.requests, self.tokens = before[REQUESTS], before[TOKENS]


class WorkerQuotas(Quotas):
    """`Quotas` of one of several workers. `column`, `others`: of the table of keys."""

    def __init__(
        self,
        limits: Callable[[], Mapping[str, KeyLimits]],
        now: Callable[[], float],
        column: Column,
        others: Others,
    ) -> None:
        super().__init__(limits, now)
        self._column = column
        self._others = others
        self._used: dict[str, _Used] = {}

    def _account(self, key: str, own: KeyLimits) -> Account:
        account = super()._account(key, own)
        used = self._used.get(key)
        if used is None:
            number = key_of(key)
            used = self._used[key] = _Used(number, self._column.read(number))
        self.take_over(used, account)
        return account

    def _follow(self, limits: Mapping[str, KeyLimits]) -> None:
        super()._follow(limits)
        for name in self._used.keys() - self._accounts.keys():
            del self._used[name]
        # Also what this worker's predecessor has left: keys come and go for as long as the proxy
        # runs.
        kept = {used.key for used in self._used.values()} | set(map(key_of, limits))
        for key in set(self._column.keys()) - kept:
            self._column.drop(key)

    def _begun(self, key: str, account: Account) -> Use:
        used = self._used[key]
        used.requests = _wrapped(used.requests + _SCALE)
        self.show(used, account)
        return _SharedUse(self, used, account, self._now)

    def take_over(self, used: _Used, account: Account) -> None:
        """Have a name's buckets be what they are by the use in all workers."""
        others = self._others.each(used.key)
        account.elsewhere = sum([one[INFLIGHT] for one in others])
        # Of two that were shown at the same time, the one with more use in it is the later one.
        newest = max(
            [self._column.read(used.key), *others], key=lambda one: (one[SHOWN], one[REQUESTS_SEEN])
        )
        if not newest[SHOWN]:
            return
        requests, tokens = self._total(used, others)
        level = newest[REQUESTS_LEFT] - _wrapped(requests - newest[REQUESTS_SEEN])
        self._go_on(account.requests, level, newest[REQUESTS_SINCE], newest[REQUESTS_LIMIT])
        level = newest[TOKENS_LEFT] - _wrapped(tokens - newest[TOKENS_SEEN])
        self._go_on(account.tokens, level, newest[TOKENS_SINCE], newest[TOKENS_LIMIT])

    def show(self, used: _Used, account: Account) -> None:
        """Show the others what a name has used here."""
        levels, since, limits = [0, 0], [0, 0], [0, 0]
        for at, bucket in enumerate((account.requests, account.tokens)):
            # not filled: where the limit caps it depends on when that is done
            if bucket is not None:
                levels[at] = min(max(round(bucket.level * _SCALE), -_MOST), _MOST)
                since[at], limits[at] = round(bucket.since * 1e9), min(bucket.per_minute, _MOST)
        seen = self._total(used, self._others.each(used.key))
        shown = max(1, int(self._now() * 1e9))
        numbers = (
            used.requests,
            used.tokens,
            account.inflight,
            *levels,
            *since,
            *limits,
            *seen,
            shown,
        )
        self._column.write(used.key, numbers)

    @staticmethod
    def _total(used: _Used, others: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Return the requests and the tokens that were used in all workers."""
        requests, tokens = used.requests, used.tokens
        for one in others:
            requests += one[REQUESTS]
            tokens += one[TOKENS]
        return _wrapped(requests), _wrapped(tokens)

    @staticmethod
    def _go_on(bucket: Bucket | None, level: int, since: int, limit: int) -> None:
        if bucket is not None and limit:  # a limit that has changed since then changes what is left
            bucket.level, bucket.since = level / _SCALE + (bucket.per_minute - limit), since / 1e9


class _SharedUse(Use):
    """A `Use` that the other workers see."""

    __slots__ = ("_name", "_quotas")

    def __init__(
        self, quotas: WorkerQuotas, used: _Used, account: Account, now: Callable[[], float]
    ) -> None:
        super().__init__(account, now)
        self._quotas = quotas
        self._name = used

    def reserve(self, prompt: int, most: int | None, answers: int = 1) -> None:
        """See `Use`."""
        self._quotas.take_over(self._name, self._account)
        super().reserve(prompt, most, answers)
        self._show(self._reserved)

    def _grow(self, bucket: Bucket, more: float) -> None:
        self._quotas.take_over(self._name, self._account)
        super()._grow(bucket, more)
        self._show(more)

    def end(self, tokens: int, unseen: float = 0.0, seen: int = 0) -> None:
        """See `Use`."""
        self._quotas.take_over(self._name, self._account)
        super().end(tokens, unseen, seen)
        self._show(self._used(tokens, unseen, seen) - self._reserved)

    def add(self, tokens: int) -> None:
        """See `Use`."""
        self._quotas.take_over(self._name, self._account)
        super().add(tokens)
        self._show(self._used(tokens))

    def _show(self, tokens: float) -> None:
        self._name.tokens = _wrapped(self._name.tokens + round(tokens * _SCALE))
        self._quotas.show(self._name, self._account)


def _wrapped(number: int) -> int:
    """Return a sum as a cell of 64 bits has it."""
    return (number + _WRAP // 2) % _WRAP - _WRAP // 2
