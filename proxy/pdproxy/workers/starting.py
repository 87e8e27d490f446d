"""Why the proxy does not know its engines yet: the scheduler process follows the sources of
engines, and all workers take no requests until one has answered. A worker that was not told yet
does not know either: the scheduler process may still wait for an answer.
"""

from __future__ import annotations

from pdproxy.app.compose import Proxy
from pdproxy.workers.publisher import Publisher
from pdproxy.workers.subscriber import Subscriber

STARTING = "starting"
"""The topic. It has no value once a source has answered."""
UNTOLD = "starting: the scheduler process has not said which engines there are"


def tell(publisher: Publisher, proxy: Proxy) -> None:
    """Have the scheduler process tell workers."""
    sources = proxy.sources
    topic = publisher.topic(STARTING, lambda _: sources.why_starting())
    last = topic.encoded("")

    def look() -> None:
        nonlocal last
        if (now := topic.encoded("")) != last:
            last = now
            if now is None:
                topic.gone("")
            else:
                topic.changed()

    sources.when_found = look


def follow(subscriber: Subscriber, proxy: Proxy) -> None:
    """Have a worker show it."""
    told = subscriber.subscribe(STARTING, str, lambda _, __: None, is_whole=True)
    proxy.readiness.why_starting = lambda: told.values.get("") if told.has_all else UNTOLD
