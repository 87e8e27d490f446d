"""The composition root of the operator's process: options in, its parts connected, and one exit
code out.

Nothing is saved at the end: whatever an operator was about to do, the next one finds that it is
left to do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import uvloop

from pdproxy.app import uncaught
from pdproxy.kit import core_dumps
from pdproxy.kit.frames import frames
from pdproxy.observe.logs import configure
from pdproxy.settings.keys import read_secret
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.settings.listen import LogFormat, LogLevel
from pdproxy.upstream.kubernetes import KubernetesApi
from pdproxy_operator.api import Api
from pdproxy_operator.counted import Counted
from pdproxy_operator.health import Answer, bound, health_listener
from pdproxy_operator.lease import Election, LostError
from pdproxy_operator.pages import Pages
from pdproxy_operator.reconcile import Reconciler
from pdproxy_operator.resources import Name
from pdproxy_operator.store import Group, Store
from pdproxy_operator.transitions import Rate
from pdproxy_operator.work import Work

logger = logging.getLogger("pdproxy.operator")
RECURSION = 40_000
"""Python's limit of calls in calls. The API server takes objects of 10,000 levels: one of them may
not keep the operator from reading a list with all others.
"""
STALE = 900.0
"""Seconds for which the API server may say nothing before /health fails: an API server that is away
is no reason to start the operator again.
"""
NOT_READY = 180.0
"""The same, before /ready fails."""


class Options(NamedTuple):
    """Options of the command line. `namespaces`: empty: all."""

    namespaces: tuple[str, ...]
    kubeconfig: str | None
    context: str | None
    leader_elect: bool
    host: str
    port: int
    secret_file: str | None
    log_level: LogLevel
    log_format: LogFormat


def run(options: Options) -> int:
    """Run until a signal comes. Return the exit code: 0, or 1 after a failure, and where another
    operator acts from now on.

    Raises:
        SettingsError: the options are wrong.
    """
    core_dumps.forbid()
    sys.setrecursionlimit(RECURSION)
    path = options.secret_file
    secret = None if path is None else read_secret("--secret-file", path)
    with bound(options.host, options.port) as listening:
        times = Kubernetes(kubeconfig=options.kubeconfig, context=options.context)
        api = KubernetesApi(times)
        log = configure(options.log_level, options.log_format)
        uncaught.install()
        try:
            return uvloop.run(
                _run_until_signalled(Operator(options, api, times, secret), listening)
            )
        except Exception as error:
            logger.critical("the operator failed: %s", frames(error))
            return 1
        finally:
            log.close()


async def _run_until_signalled(operator: Operator, listening: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(uncaught.log_failure)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    async with health_listener(operator.answers()).serving(listening):
        running = asyncio.create_task(operator.run())
        waiting = asyncio.create_task(ended.wait())
        done, left = await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
        for one in left:
            one.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        return running.result() if running in done else 0


class Operator:
    """All parts of an operator, connected. `secret`: see `Reconciler`."""

    def __init__(
        self, options: Options, api: KubernetesApi, times: Kubernetes, secret: str | None
    ) -> None:
        self._counted = Counted()
        self._store = Store(api, times, options.namespaces, self._changed)
        name = os.environ.get("POD_NAME") or socket.gethostname()
        self._holder = f"{name}-{secrets.token_hex(4)}"
        self._election = (
            Election(api.connection(), api.namespace, self._holder, time.monotonic)
            if options.leader_elect
            else None
        )
        self._api = Api(api, self._counted.wrote, lambda: self._may_act)
        self._pages = Pages(self._store, secret, self._said)
        self._reconciler = Reconciler(
            self._store,
            self._api,
            self._pages,
            Rate(time.monotonic),
            secret,
            self._holder,
            time.time,
        )
        self._work = Work(self._reconciler.reconcile, self._counted.ended)
        self._begun: float | None = None
        self._counted.show(
            queue=lambda: len(self._work.queue),
            age=self._age,
            leader=lambda: self._may_act,
            unreadable=lambda: len(self._store.unreadable),
        )

    def __repr__(self) -> str:
        return f"<Operator {self._store}>"

    @property
    def _may_act(self) -> bool:
        return self._election is None or self._election.is_leader

    def _changed(self, group: Group, by_user: bool) -> None:
        self._work.queue.add(group, is_fresh=by_user)

    def _said(self, proxy: Name) -> None:
        self._work.queue.add(Group("PDProxy", *proxy))

    async def run(self) -> int:
        """Run until cancelled, or until another operator may act: then return the exit code 1."""
        self._begun = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._store.run())
                await self._store.complete.wait()
                if self._election is not None:
                    await self._election.won()
                    logger.info("this operator acts: %s", self._holder)
                    tasks.create_task(self._election.keep())
                tasks.create_task(self._work.run())
                tasks.create_task(self._pages.run())
        except* LostError:
            logger.error("another operator may act: this one ends")  # noqa: TRY400
        finally:
            await self._api.close()
        return 1

    # how it is

    def answers(self) -> Mapping[str, Callable[[], Answer]]:
        """Return what is answered at which path."""
        return {
            "/health": lambda: self._answer(STALE),
            "/ready": self._ready,
            "/metrics": lambda: Answer(200, self._counted.page()),
        }

    def _age(self) -> float:
        now = asyncio.get_running_loop().time()
        return 0.0 if self._begun is None else now - max(self._store.heard_at, self._begun)

    def _ready(self) -> Answer:
        if not self._store.complete.is_set():
            why = "; ".join(self._store.problems())
            return Answer(503, f"not all objects are known yet: {why}\n")
        return self._answer(NOT_READY)

    def _answer(self, limit: float) -> Answer:
        if (age := self._age()) <= limit:
            return Answer(200, "ok\n")
        why = "; ".join(self._store.problems()) or "the API server says nothing"
        return Answer(503, f"nothing was heard for {age:.0f} s: {why}\n")
