"""Asks name servers for addresses and service records, with their times to live. By dnspython.

Owns the deadline of a question, and what of an answer can be no engine's address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdproxy.kit.addresses import read_address
from pdproxy.kit.engine_networks import USUAL, EngineNetworks
from pdproxy.settings.dns import Dns, DnsName, server_of

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver as _Library


class LookupFailedError(Exception):
    """A question has no answer that can be used. `str()` says why, in a few words. `late`: none
    came in time.
    """

    def __init__(self, why: str, *, late: bool = False) -> None:
        super().__init__(why)
        self.late = late


@dataclass(frozen=True, slots=True)
class DnsRecords:
    """What a name has of one type: hosts with their ports (None: that of the URL), and for how many
    seconds that holds.
    """

    places: tuple[tuple[str, int | None], ...]
    ttl: float


class Resolver:
    """Asks the servers of the settings, or the system's. One for all names."""

    def __init__(self, dns: Dns, networks: EngineNetworks = USUAL) -> None:
        """Ask by these settings. Addresses outside of `networks` are left out: no engine may be
        there.
        """
        self._dns = dns
        self._networks = networks
        self._library: _Library | None = None

    async def look_up(self, name: DnsName) -> Mapping[str, DnsRecords | LookupFailedError]:
        """Return what a name has, by type: addresses of both families, or service records. Never
        raises LookupFailedError.
        """
        types = ("SRV",) if name.port is None else ("A", "AAAA")
        return dict(
            zip(
                types,
                await asyncio.gather(*(self._records(name.name, one) for one in types)),
                strict=True,
            )
        )

    async def _records(self, name: str, kind: str) -> DnsRecords | LookupFailedError:
        try:
            # the library's own deadline is the first
            async with asyncio.timeout(self._dns.timeout + 1.0):
                return await self._ask(name, kind)
        except LookupFailedError as error:
            return error
        except TimeoutError:
            return LookupFailedError(f"no answer in {self._dns.timeout:g} s", late=True)

    async def _ask(self, name: str, kind: str) -> DnsRecords:
        # Imported here: only a proxy with such engines needs the library.
        from dns.exception import DNSException, Timeout
        from dns.resolver import NXDOMAIN, NoNameservers

        try:
            resolver = self._made()
            answer = await resolver.resolve(
                name, kind, raise_on_no_answer=False, search=True, lifetime=self._dns.timeout
            )
        except Timeout:
            raise LookupFailedError(f"no answer in {self._dns.timeout:g} s", late=True) from None
        except NXDOMAIN:
            raise LookupFailedError("no such name") from None
        except NoNameservers:
            raise LookupFailedError(
                "the servers refuse, fail, or answer what can't be read"
            ) from None
        except (DNSException, OSError, ValueError) as error:
            raise LookupFailedError(f"{type(error).__name__}") from None
        found: list[tuple[str, int | None]] = []
        for record in answer.rrset or ():
            if kind == "SRV":
                host = record.target.to_text(omit_final_dot=True).lower()
                if host not in ("", ".") and record.port:  # a dot: the service is not to be had
                    found.append((host, record.port))
            elif (usable := self._usable(record.address)) is not None:
                found.append((usable, None))
        places = tuple(sorted(set(found), key=str))
        if len(places) > Dns.most:
            raise LookupFailedError(f"names {len(places)} engines: {Dns.most} at most")
        return DnsRecords(places, float(answer.chaining_result.minimum_ttl))

    def _usable(self, text: str) -> str | None:
        """Return an address in its normal spelling, None for one at which no engine can be."""
        address = read_address(text)
        return None if address is None or self._networks.why_not(text) is not None else str(address)

    def _made(self) -> _Library:
        """Return the library's resolver. One that reads the system's settings is made anew: they
        may change.
        """
        from dns.asyncresolver import Resolver as Library
        from dns.nameserver import Do53Nameserver

        if not self._dns.servers:
            return Library()
        if self._library is None:
            self._library = Library(configure=False)
            self._library.nameservers = [
                Do53Nameserver(*server_of(text)) for text in self._dns.servers
            ]
        return self._library
