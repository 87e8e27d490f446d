"""Sources of engines: what finds the engines of a pool while the proxy runs, such as DNS. What each
has in the settings.

A source is named in `pools[].nodes[]` by a URL whose scheme is its own; the other settings of the
node hold for all engines that it finds. A kind of source has a section of the settings, of the type
`SourceSection`: the field of `settings.schema.Settings` registers it. What follows it while the
proxy runs is the module `fleet.NAME_source`, with the section's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar
from urllib.parse import urlsplit

from pdproxy.settings.errors import KeyPath, Mistakes
from pdproxy.settings.section import Section


class SourceSection(Section, frozen=True):
    """The section of a kind of source."""

    schemes: ClassVar[Mapping[str, str]]
    """The schemes of its URLs, each with that of its engines' URLs: http or https."""
    who: ClassVar[str]
    """What names the engines, for messages: `DNS`."""
    forms: ClassVar[str]
    """How its URLs look and what they stand for, for the help of the command line: a few words."""
    most: ClassVar[int] = 256
    """Engines that one source may find: more are taken for a mistake."""
    labels_roles: ClassVar[bool] = False
    """Whether what it finds may say its role (`role: by_label`), and has labels of its own."""

    @classmethod
    def spelled(cls, url: str, path: KeyPath, where: str = "") -> str:
        """Return one of its URLs in its normal spelling. `where`: the source of the URL.

        Raises:
            SettingsError: naming `path` and the URL, which is none of its URLs.
        """
        raise NotImplementedError

    @classmethod
    def stand_in(cls, url: str) -> str:
        """Return the URL of an engine that stands for all that it will find, where engines are
        checked together.
        """
        parts = urlsplit(url)
        return (
            f"{cls.schemes[parts.scheme]}://{parts.netloc if parts.port else f'{parts.netloc}:1'}"
        )

    def check(self, found: Mistakes) -> None:
        """Check its fields against each other. Mistakes are added to `found`."""
