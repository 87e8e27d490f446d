"""Notices of several workers: an engine's notice comes to any of them, and is passed on to the one
whose prompt it is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pdproxy.kit import ids
from pdproxy.kit.siblings import Siblings
from pdproxy.observe.events import KvNoticed, Observers
from pdproxy.wire.notices import Notice

AT_ONCE = 1 << 20
"""Bytes of notices that wait to be passed on at once, but for the last notice."""
_OTHERS = 1024
"""Bytes of a notice besides the handle and the ids that it may carry, about."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Notice]).decode


class WorkerNotices:
    """What worker `number` of so many `workers` does with notices that have come to it. Ids name
    the worker that has made them.

    `topic`: under which the others hear them; `take`: takes the own ones; `is_read`: whether
    anything reads the handles and ids that they may carry; `failed`: what is called if one can't be
    processed.
    """

    def __init__(
        self,
        number: int,
        workers: int,
        topic: str,
        siblings: Siblings,
        take: Callable[[Notice], None],
        observers: Observers,
        failed: Callable[[Exception], None],
        *,
        is_read: bool,
    ) -> None:
        self._number = number
        self._workers = workers
        self._topic = topic
        self._siblings = siblings
        self._take = take
        self._observers = observers
        self._failed = failed
        self._is_read = is_read
        self._due: dict[int, list[Notice]] = {}
        """Notices for other workers, which are sent when the event loop has read what is there."""
        self._size = 0
        siblings.hears[topic] = self.received

    def __repr__(self) -> str:
        return f"<SharedNotices of worker {self._number}: {self._size} bytes to be passed on>"

    def receive(self, notice: Notice) -> None:
        """Take a notice that an engine has sent to this worker. One that names no worker is taken
        here, as an unknown one.
        """
        owner = ids.worker_of(notice.request_id)
        if owner is None or owner == self._number or owner >= self._workers:
            self._take(notice)
            return
        if not self._is_read:
            notice = msgspec.structs.replace(notice, params=None, token_ids=None)
        if not self._due:
            asyncio.get_running_loop().call_soon(self._pass_on)
        self._due.setdefault(owner, []).append(notice)
        self._size += _OTHERS + len(notice.params or b"") + len(notice.token_ids or b"")
        if self._size >= AT_ONCE:
            self._pass_on()

    def _pass_on(self) -> None:
        due, self._due, self._size = self._due, {}, 0
        for owner, notices in due.items():
            if not self._siblings.pass_on(owner, self._topic, _encode(notices)):
                for notice in notices:
                    self._observers.notify(KvNoticed(notice.event.value, "not_passed"))

    def received(self, body: bytes) -> None:
        """Take notices that another worker has passed on."""
        for notice in _decode(body):
            try:
                self._take(notice)
            except Exception as error:  # a defect here must not lose the notices behind this one
                self._failed(error)
