"""Authorities, certificates and settings for tests of TLS."""

import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from pdproxy.settings.schema import Settings
from pdproxy.settings.tls import EngineTls, ListenTls, listen_context
from tests.fakes import answers
from tests.fakes.world import World, world

BIG = answers.piece(False, "x" * 30_000)


@dataclass
class Side:
    """One authority and what it has signed for this machine, in files and as a server's context."""

    ca: trustme.CA
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir()
        self.ca.cert_pem.write_to_path(self.authority)
        self.sign()

    def sign(self, *names: str, **more: Any) -> None:
        """Write a new certificate and key over those before."""
        one = self.ca.issue_cert(*(names or ("127.0.0.1", "localhost")), **more)
        one.private_key_pem.write_to_path(self.key)
        with Path(self.certificate).open("wb") as file:
            file.writelines(part.bytes() for part in one.cert_chain_pems)

    @property
    def authority(self) -> str:
        return str(self.folder / "ca.pem")

    @property
    def certificate(self) -> str:
        return str(self.folder / "cert.pem")

    @property
    def key(self) -> str:
        return str(self.folder / "key.pem")

    def server(self) -> ssl.SSLContext:
        """The context of a server with this certificate."""
        return listen_context(ListenTls(certificate=self.certificate, key=self.key))

    def trusting(self, own: "Side | None" = None) -> ssl.SSLContext:
        """The context of a client that trusts this authority, with a certificate of `own`."""
        context = ssl.create_default_context(cafile=self.authority)
        if own is not None:
            context.load_cert_chain(own.certificate, own.key)
        return context


def front(side: Side, **more: Any) -> Callable[[Settings], Settings]:
    """Settings with TLS for clients."""

    def adjust(settings: Settings) -> Settings:
        tls = ListenTls(certificate=side.certificate, key=side.key, **more)
        return msgspec.structs.replace(
            settings, listen=msgspec.structs.replace(settings.listen, tls=tls)
        )

    return adjust


def behind(**tls: Any) -> Callable[[Settings], Settings]:
    """Settings with TLS for engines, as the pool says it."""

    def adjust(settings: Settings) -> Settings:
        pools = tuple(
            msgspec.structs.replace(pool, tls=EngineTls(**tls)) for pool in settings.pools
        )
        return msgspec.structs.replace(settings, pools=pools)

    return adjust


def fronted(ours: Side, **more: Any) -> AbstractAsyncContextManager[World]:
    return world(adjust=front(ours), client_tls=ours.trusting(), **more)


def legs_failed(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """What the log says of legs that failed."""
    return [r.fields for r in caplog.records if r.getMessage() == "leg failed"]  # type: ignore[attr-defined]
