"""The section `listen`: where clients and operators reach the proxy.

Owns names, units, bounds and defaults.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pdproxy.settings.admin import AdminAddress
from pdproxy.settings.section import File, Host, Option, Port, Seconds, Section, Text

RootPath = Annotated[
    str,
    Meta(
        pattern=r"\A(/[A-Za-z0-9._~-]+)*\Z",
        max_length=128,
        description="a path such as /llm, without a slash at its end",
    ),
]
OperatorRoutes = Literal["auto", "everywhere", "admin"]
Workers = Annotated[int, Meta(ge=1, le=64)]


class ListenTls(Section, frozen=True):
    """TLS for clients. Files are PEM, and are read again when they change."""

    certificate: Annotated[
        File | None,
        Option(
            "the server's certificate with its chain, PEM; turns on TLS (default: no TLS)", "FILE", "--ssl-certfile"
        ),
    ] = None
    """The server's certificate with its chain. None: plain HTTP."""

    key: Annotated[
        File | None,
        Option("the certificate's private key, PEM (default: in the certificate's file)", "FILE", "--ssl-keyfile"),
    ] = None
    """Its private key. None: it is in the certificate's file, too."""

    key_password_file: File | None = None
    """The key's password, on the first line of a file. None: the key is not encrypted."""

    client_ca: Annotated[
        File | None,
        Option(
            "authorities, PEM: clients must have a certificate from one of them (default: clients need none)",
            "FILE",
            "--ssl-ca-certs",
        ),
    ] = None
    """Authorities of client certificates. If set, a client without such a certificate gets no connection."""


class Cors(Section, frozen=True):
    """What browsers on pages of other sites may do. Names and defaults of vLLM's flags."""

    allowed_origins: Annotated[
        tuple[Text, ...],
        Option(
            "origins whose pages may read answers, such as https://chat.example.com; '*': all (default: none)",
            "LIST",
            "--allowed-origins",
        ),
    ] = ()
    """Origins whose pages may read answers; `*` means all. None by default."""

    allow_credentials: Annotated[
        bool, Option("whether these pages may send cookies: true or false", "BOOL", "--allow-credentials")
    ] = False
    """Whether such pages may send cookies and the like."""

    allowed_methods: Annotated[
        tuple[Text, ...],
        Option("HTTP methods that these pages may use, such as GET,POST (default: all)", "LIST", "--allowed-methods"),
    ] = ("*",)
    """Methods that they may use; `*` means all."""

    allowed_headers: Annotated[
        tuple[Text, ...],
        Option(
            "request headers that these pages may send, such as Authorization (default: all)",
            "LIST",
            "--allowed-headers",
        ),
    ] = ("*",)
    """Headers that they may send; `*` means all."""


class Listen(Section, frozen=True):
    """Where clients reach the proxy."""

    host: Annotated[Host, Option("address to listen on; 0.0.0.0: all of IPv4", "HOST", "--host")] = "127.0.0.1"
    """Address to bind. The loopback by default, so that a proxy is open to a network only if the operator wants it."""

    port: Annotated[Port, Option("TCP port to listen on", "PORT", "--port")] = 8000
    """TCP port. The default of `vllm serve`, so that clients need no change."""

    uds: Annotated[
        File | None,
        Option(
            "Unix socket to listen on, in place of host and port; the umask says who may connect (default: TCP)",
            "PATH",
            "--uds",
        ),
    ] = None
    """Path of a Unix socket in place of host and port. Who may connect follows from the process's umask. None: TCP."""

    root_path: Annotated[
        RootPath,
        Option(
            "the path below which a balancer serves this proxy, such as /llm; it may strip it or not (default: none)",
            "PATH",
            "--root-path",
        ),
    ] = ""
    """The path before all routes, if a proxy in front serves this one below it: whether that one strips it or leaves it."""

    workers: Annotated[
        Workers,
        Option(
            "processes that serve clients, each on one core at most; some settings work with one only", "N", "--workers"
        ),
    ] = 1
    """Processes that serve clients: each uses one core at most. With several, a further process supervises them."""

    keep_alive: Seconds = 75.0
    """A connection without a request, before it is closed. It must be longer than balancers in front keep theirs (60 s is usual):
    else they send requests on connections that are just being closed."""

    linger: Annotated[float, Meta(ge=0, le=604_800)] = 5.0
    """After SIGTERM, seconds in which new requests are still served while `/ready` says no: balancers take that long to notice.
    0: they are refused at once."""

    trusted_proxies: tuple[Text, ...] = ()
    """Addresses or networks of proxies in front of this one. For a request from there, the client's address is the last one in
    `X-Forwarded-For` that is not a proxy's. Other senders' headers are not read: a client could name any address. `unix:`: all
    who connect to `uds`."""

    operator_routes: OperatorRoutes = "auto"
    """Who may see at the clients' port what is for operators: everybody, or only who has an admin key. At `admin` everybody does
    who may use it. auto: `admin` with keys for clients, or with a tenant header; otherwise `everywhere`."""

    admin: Annotated[
        AdminAddress | None,
        Option(
            "where the admin API listens, for `pdproxy engines`: unix:PATH, or HOST:PORT (default: there is none)",
            "ADDRESS",
            "--admin",
        ),
    ] = None
    """Where the admin API listens: `unix:PATH`, or `HOST:PORT`, of the loopback unless it has keys. None: there is none."""

    tls: ListenTls = ListenTls()
    """TLS for clients."""
    cors: Cors = Cors()
    """What browsers on pages of other sites may do."""
