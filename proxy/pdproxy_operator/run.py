"""The composition root of the operator's process: options in, its parts connected, and one exit
code out.

Nothing is saved at the end: whatever an operator was about to do, the next one finds that it is
left to do.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from typing import NamedTuple

import uvloop

from pdproxy.app import uncaught
from pdproxy.kit import core_dumps
from pdproxy.kit.frames import frames
from pdproxy.observe.logs import configure
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.kubernetes import Kubernetes
from pdproxy.settings.listen import LogFormat, LogLevel
from pdproxy.upstream.kubernetes import KubernetesApi
from pdproxy_operator.counted import Counted
from pdproxy_operator.health import Answer, bound, health_listener
from pdproxy_operator.store import Group, Store
from pdproxy_operator.work import Work

logger = logging.getLogger("pdproxy.operator")
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
    """Run until a signal comes. Return the exit code: 0, or 1 after a failure.

    Raises:
        SettingsError: the options are wrong.
    """
    core_dumps.forbid()
    with bound(options.host, options.port) as listening:
        api = KubernetesApi(Kubernetes(kubeconfig=options.kubeconfig, context=options.context))
        log = configure(options.log_level, options.log_format)
        uncaught.install()
        try:
            return uvloop.run(Operator(options, api).run(listening))
        except SettingsError:
            raise
        except Exception as error:
            logger.critical("the operator failed: %s", frames(error))
            return 1
        finally:
            log.close()


class Operator:
    """All parts of an operator, connected."""

    def __init__(self, options: Options, api: KubernetesApi) -> None:
        self._options = options
        self._api = api
        self._counted = Counted()
        self._work = Work(self._reconcile, self._counted.ended)
        times = Kubernetes(kubeconfig=options.kubeconfig, context=options.context)
        self._store = Store(api, times, options.namespaces, self._changed)
        self._begun = 0.0

    def __repr__(self) -> str:
        return f"<Operator {self._store}>"

    def _changed(self, group: Group, by_user: bool) -> None:
        self._work.queue.add(group, is_fresh=by_user)

    async def _reconcile(self, group: Group) -> float | None:
        logger.info("%s", group)
        return None

    async def run(self, listening: socket.socket) -> int:
        """Run until a signal comes. Return the exit code."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(uncaught.log_failure)
        self._begun = loop.time()
        self._counted.show(
            queue=lambda: len(self._work.queue),
            age=self._age,
            leader=lambda: 1,
            unreadable=lambda: len(self._store.unreadable),
        )
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ended.set)
        answers = {
            "/health": self._health,
            "/ready": self._ready,
            "/metrics": lambda: Answer(200, self._counted.page()),
        }
        async with health_listener(answers).serving(listening):
            acting = asyncio.create_task(self._act())
            waiting = asyncio.create_task(ended.wait())
            done, left = await asyncio.wait({acting, waiting}, return_when="FIRST_COMPLETED")
            for one in left:
                one.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            if acting in done:
                acting.result()  # it ends by a failure alone
        return 0

    async def _act(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._store.run())
            await self._store.complete.wait()
            tasks.create_task(self._work.run())

    def _age(self) -> float:
        return asyncio.get_running_loop().time() - max(self._store.heard_at, self._begun)

    def _health(self) -> Answer:
        return self._answer(STALE)

    def _ready(self) -> Answer:
        if not self._store.complete.is_set():
            return Answer(503, "not all objects are known yet\n")
        return self._answer(NOT_READY)

    def _answer(self, limit: float) -> Answer:
        if (age := self._age()) <= limit:
            return Answer(200, "ok\n")
        why = "; ".join(self._store.problems()) or "the API server says nothing"
        return Answer(503, f"nothing was heard for {age:.0f} s: {why}\n")
