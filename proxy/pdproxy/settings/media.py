"""The section `media`: which URLs of media in requests engines may fetch."""

from __future__ import annotations

from pdproxy.settings.errors import Mistakes
from pdproxy.settings.section import AtOnce, Host, Section
from pdproxy.wire.media_rule import Media, Urls


class MediaSettings(Section, frozen=True):
    """Images, audio and video in requests, on all routes. A data: URL holds the medium itself, and always passes."""

    urls: AtOnce[Urls] = "off"
    """Which other URLs pass. Engines fetch what passes: from wherever they can reach, and also where a redirect leads
    (VLLM_MEDIA_URL_ALLOW_REDIRECTS of vLLM). Others get 400.
      off    none
      hosts  http and https URLs of the hosts below
      any    all, file:// included, which vLLM reads only below its --allowed-local-media-path
    """

    hosts: AtOnce[tuple[Host, ...]] = ()
    """Names in full, without a port, such as [images.example.com]."""

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
