"""The section `media`: which URLs of media in requests engines may fetch."""

from __future__ import annotations

from pdproxy.settings.errors import Mistakes
from pdproxy.settings.section import AtOnce, Host, Section
from pdproxy.wire.media_rule import Media, Urls


class MediaSettings(Section, frozen=True):
    """Images, audio and video in requests. `data:` URLs hold them, and always pass."""

    urls: AtOnce[Urls] = "off"
    """Which other URLs pass: none, those of `hosts`, or any. Engines fetch what passes, from wherever they can reach."""

    hosts: AtOnce[tuple[Host, ...]] = ()
    """Hosts whose http and https URLs pass, with `urls: hosts`: names in full, without a port."""

    @property
    def rule(self) -> Media:
        """What bodies are checked by."""
        return Media(self.urls, tuple(host.lower() for host in self.hosts))


def check_media_settings(media: MediaSettings, found: Mistakes) -> None:
    """Check that hosts are named if, and only if, they are asked for."""
    key = ("media", "hosts")
    if media.hosts and media.urls != "hosts":
        found.add(key, f"media.hosts: has no effect without media.urls: hosts{found.source(key)}")
    if media.urls == "hosts" and not media.hosts:
        found.add(key, f"media.hosts: expected at least one, for media.urls: hosts{found.source(('media', 'urls'))}")
