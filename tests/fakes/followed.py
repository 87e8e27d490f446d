"""A proxy that follows the files of its settings, with as many workers as the tests run with."""

from __future__ import annotations

from functools import partial

from pdproxy.app.compose import Proxy
from pdproxy.app.reloading import Reloading, SettingsSource
from pdproxy.app.server import follow, live_settings
from pdproxy.observe.logs import Log
from pdproxy.workers.settings import SettingsForWorkers, SettingsOfWorker
from pdproxy.workers.share import WorkerShare
from tests.fakes.world import World


def followed(w: World, source: SettingsSource, log: Log) -> Reloading:
    """Have all workers follow the files: the first one reads them, and tells the others."""
    first, *others = w.workers
    live = live_settings(first, log)
    if not others:
        return follow(first, source, live)
    share = _share(first)
    for other in others:
        subscriber = _share(other).links.link.subscriber
        told = SettingsOfWorker(
            live_settings(other, log), source.first, 1, subscriber, partial(_is_closed, other)
        )
        other.readiness.show(told.shortcomings)
    tells = SettingsForWorkers(live, source.first, share.links.publisher, share.keeper)
    return follow(first, source, tells)


def _is_closed(proxy: Proxy) -> bool:
    return proxy.admission.closed


def _share(proxy: Proxy) -> WorkerShare:
    assert isinstance(proxy.share, WorkerShare)
    return proxy.share
