"""The rule for media that requests name by URL. `wire.media` applies it."""

from __future__ import annotations

from typing import Literal

import msgspec

Urls = Literal["off", "hosts", "any"]


class Media(msgspec.Struct, frozen=True):
    """Which URLs pass besides `data:`. `hosts`: whose URLs pass with `hosts`, in small letters.
    `embeds`: whether embeddings pass that stand in the place of media.
    """

    urls: Urls = "any"
    hosts: tuple[str, ...] = ()
    embeds: bool = True


ANY = Media()
