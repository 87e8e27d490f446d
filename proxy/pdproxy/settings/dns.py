"""What DNS names: engines, as a source of them, and other proxies. The sections `dns` and
`replicas`, and their checks.

Owns units, bounds and defaults, and the normal spelling of such a URL.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

from pdproxy.kit.addresses import read_address, read_place
from pdproxy.scheduling.replicas import MAX_REPLICAS
from pdproxy.settings.errors import KeyPath, Mistakes, SettingsError, quote, spell_key
from pdproxy.settings.section import Seconds, Section, Text
from pdproxy.settings.sources import SourceSection

SCHEMES = {"dns": "http", "dnss": "https", "srv": "http", "srvs": "https"}
"""See `SourceSection`."""
_NAME = re.compile(
    r"(?=.{1,253}\Z)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?"
    r"\.?"
)
_PORT = 53

AUTO: Literal["auto"] = "auto"
Replicas = Annotated[int, Meta(ge=1, le=MAX_REPLICAS)] | Literal["auto"]


class Dns(SourceSection, frozen=True):
    """DNS as a source of engines: dns://NAME:PORT is one at each address of a name, srv://NAME one
    at each target of its service records; dnss:// and srvs://: with TLS.

    What can't be answered changes nothing; an engine that is missing in two answers in a row is
    drained and removed.
    """

    schemes = SCHEMES
    who = "DNS"
    forms = "dns://NAME:PORT, srv://NAME: all that DNS names"

    servers: tuple[Text, ...] = ()
    """Name servers to ask, such as [10.0.0.2, 10.0.0.3:5353]. []: those of the system, with its
    search list.
    """

    timeout: Seconds = 5.0
    """Seconds for an answer to one question, all servers and attempts included."""

    min_ttl: Seconds = 5.0
    """Seconds between two questions at least, whatever time to live an answer has."""

    max_ttl: Seconds = 60.0
    """Seconds between two questions at most: an engine that is new or gone is noticed after
    that.
    """

    @classmethod
    def spelled(cls, url: str, path: KeyPath, where: str = "") -> str:
        """See `SourceSection`."""
        return dns_name(url, path, where).url

    def check(self, found: Mistakes) -> None:
        """Check the addresses of name servers, and the bounds of times."""
        for at, text in enumerate(self.servers):
            here = ("dns", "servers", at)
            try:
                server_of(text)
            except ValueError:
                words = "expected an address, such as 10.0.0.2 or 10.0.0.2:5353"
                found.add(here, f"{spell_key(here)}: {quote(text)}: {words}{found.source(here)}")
        if self.min_ttl > self.max_ttl:
            where = found.source(("dns", "min_ttl"))
            found.add(
                ("dns",),
                f"dns.min_ttl = {self.min_ttl:g} is more than dns.max_ttl = "
                f"{self.max_ttl:g}{where}",
            )


class ReplicaSettings(Section, frozen=True):
    """Other proxies in front of the same engines. They share nothing: each estimates what the
    others have at each engine.
    """

    count: Replicas = 1
    """How many proxies there are, with this one. auto: as many as the name below has addresses."""

    name: Text | None = None
    """The name in DNS that has an address for each of them: on Kubernetes that of a headless
    service, such as pdproxy-replicas.default.svc.cluster.local. null: none.
    """

    @property
    def several(self) -> bool:
        """Whether there are others, or may be."""
        return self.count != 1

    @property
    def at_first(self) -> int:
        """How many there are taken to be before DNS has answered."""
        return 1 if isinstance(self.count, str) else self.count


class DnsName(NamedTuple):
    """What is asked for: addresses of a name, or with `port` None its service records. `scheme`: of
    the URL.
    """

    scheme: str
    name: str
    port: int | None

    @property
    def url(self) -> str:
        """Its normal spelling."""
        return f"{self.scheme}://{self.name}" + ("" if self.port is None else f":{self.port}")

    def engine(self, host: str, port: int | None = None) -> str:
        """Return the URL of an engine that it names."""
        shown = f"[{host}]" if ":" in host else host
        return f"{SCHEMES[self.scheme]}://{shown}:{self.port if port is None else port}"


def dns_name(url: str, path: KeyPath, where: str = "") -> DnsName:
    """Return what a URL asks for. `where`: the source of the URL.

    Raises:
        SettingsError: naming `path` and the URL.
    """

    def wrong(why: str) -> SettingsError:
        return SettingsError(f"{spell_key(path)}: {quote(url)}: {why}{where}")

    try:
        parts = urlsplit(url)
        name, port = parts.hostname or "", parts.port
    except ValueError:
        raise wrong("expected dns://NAME:PORT or srv://NAME") from None
    if parts.scheme not in SCHEMES:
        raise wrong("expected dns://NAME:PORT or srv://NAME")
    if "@" in url or parts.path not in ("", "/") or "?" in url or "#" in url:
        raise wrong("nothing but a name and a port may be in it")
    if not _NAME.fullmatch(name):
        raise wrong("no name in DNS can be so")
    has_port = parts.scheme in ("dns", "dnss")
    if has_port and not port:
        raise wrong("expected the engines' port behind the name")
    if not has_port and port is not None:
        raise wrong("the records have the ports: expected none")
    if has_port and read_address(name) is not None:
        raise wrong("is an address: expected http://host:port")
    return DnsName(parts.scheme, name, port)


def server_of(text: str) -> tuple[str, int]:
    """Return address and port of a name server. Raises ValueError for another text."""
    place = read_place(text)
    if place is None or read_address(place.host) is None or place.port == 0:
        raise ValueError(text)
    return place.host, _PORT if place.port is None else place.port


def check_replicas(replicas: ReplicaSettings, found: Mistakes) -> None:
    """Check that a name is there where it is needed, and could be one. Mistakes are added to
    `found`.
    """
    where = found.source(("replicas", "name"))
    if replicas.count == AUTO and replicas.name is None:
        found.add(
            ("replicas",),
            f"replicas.count = auto needs replicas.name, a name in DNS with their addresses{where}",
        )
    elif replicas.name is not None and replicas.count != AUTO:
        found.add(
            ("replicas",), f"replicas.name has no effect without replicas.count = auto{where}"
        )
    elif replicas.name is not None:
        try:
            dns_name(f"dns://{replicas.name}:1", ("replicas", "name"))
        except SettingsError:
            found.add(
                ("replicas", "name"),
                f"replicas.name: {quote(replicas.name)}: no name in DNS can be so{where}",
            )
