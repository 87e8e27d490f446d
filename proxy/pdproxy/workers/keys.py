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
from pdproxy.workers.scheduler_link import SchedulerLink
from pdproxy.workers.scheduler_links import SchedulerLinks

KEYS = "keys"
"""The topic, and the key of what the supervisor keeps: what all files of keys hold."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, KeyValue]).decode


class KeysForWorkers:
    """Tells workers what the files of keys hold that `own` follows. `keeper`: has the supervisor
    keep it.
    """

    def __init__(self, own: Credentials, links: SchedulerLinks, keeper: Keeper) -> None:
        self._own = own
        self._links = links
        self._keeper = keeper
        self._values = own.key_values()
        keeper.keep(KEYS, _encode(self._values))
        links.greets.append(lambda client: client.say(KEYS, _encode(self._values)))
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
            told = _encode(values)
            self._keeper.keep(KEYS, told)
            self._links.say(KEYS, told)


def credentials_of_worker(settings: Settings, kept: bytes, link: SchedulerLink) -> Credentials:
    """Return the keys and TLS contexts of a worker, that takes what the scheduler process tells.
    `kept`: what the supervisor has kept, empty: nothing yet.

    Raises:
        SettingsError: as `Credentials`.
    """
    made = Credentials(settings, ToldKeys(_decode(kept) if kept else {}))

    def hear(body: bytes) -> None:
        made.take(_decode(body))

    link.hears[KEYS] = hear
    return made
