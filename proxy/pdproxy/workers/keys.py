"""Files of keys, of several workers: the scheduler process follows them, and tells workers what
they hold. What is wrong with them is said once, by that process.

The supervisor keeps it, too: a worker that is started again begins with what is in force.
"""

from __future__ import annotations

import msgspec

from pdproxy.app.credentials import Credentials
from pdproxy.app.key_values import KeyValue, ToldKeys
from pdproxy.settings.schema import Settings
from pdproxy.workers.kept import Keeper
from pdproxy.workers.publisher import Publisher
from pdproxy.workers.subscriber import Subscriber

KEYS = "keys"
"""The topic, and the key of what the supervisor keeps: what all files of keys hold."""

_decode = msgspec.msgpack.Decoder(dict[str, KeyValue]).decode


class KeysForWorkers:
    """Tells workers what the files of keys hold that `own` follows. `keeper`: has the supervisor
    keep it.
    """

    def __init__(self, own: Credentials, publisher: Publisher, keeper: Keeper) -> None:
        self._own = own
        self._values = own.key_values()
        self._topic = publisher.topic(KEYS, lambda _: self._values, keeper=keeper)
        self._topic.changed()
        own.then.append(self._look)

    def __repr__(self) -> str:
        return f"<KeysForWorkers of {len(self._values)} files>"

    def _look(self) -> None:
        """Tell what has changed. The files were checked, or other settings are about to be in
        force.
        """
        values = self._own.key_values()
        if values != self._values:
            self._values = values
            self._topic.changed()


def credentials_of_worker(settings: Settings, kept: bytes, subscriber: Subscriber) -> Credentials:
    """Return the keys and TLS contexts of a worker, that takes what the scheduler process tells.
    `kept`: what the supervisor has kept, empty: nothing yet.

    Raises:
        SettingsError: as `Credentials`.
    """
    made = Credentials(settings, ToldKeys(_decode(kept) if kept else {}))
    subscriber.subscribe(KEYS, dict[str, KeyValue], lambda _, values: made.take(values))
    return made
