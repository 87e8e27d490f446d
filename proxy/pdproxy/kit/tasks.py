"""Named background tasks with an owner, so that none is forgotten and none dies unheard."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

logger = logging.getLogger("pdproxy")


class TaskOwner:
    """Owns every background task of one component: the only reference that keeps them alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<TaskOwner {self._name}: {len(self._tasks)} running>"

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, coroutine: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine in the background; a failure is logged with its name."""
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self._name}:{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background task %s failed", task.get_name(), exc_info=error)

    async def settle(self, timeout: float) -> int:
        """Wait up to `timeout` seconds for the tasks to end by themselves, cancel the rest; return how many those were."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout
        while self._tasks:  # one that ends may have spawned another
            if (left := end - loop.time()) <= 0:
                break
            await asyncio.wait(set(self._tasks), timeout=left)
        pending = set(self._tasks)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.gather(*pending, return_exceptions=True)
        return len(pending)
