"""The proxy's own process: the sections `listen`, where clients and operators reach it, and
`observe`, what it logs and exports.

Owns names, units, bounds and defaults, the forms of the admin API's address, and when that needs a
key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta

from pdproxy.kit.addresses import Network, is_loopback, read_network
from pdproxy.settings.errors import Mistakes, quote, spell_key
from pdproxy.settings.section import AtOnce, File, Host, Option, Port, Seconds, Section, Text
from pdproxy.settings.tls import ListenTls
from pdproxy.settings.tracing import Tracing

UNIX = "unix:"
AdminAddress = Annotated[
    str,
    Meta(
        pattern=r"\A(unix:[^\x00]+|[^\s/\[\]:]+:[0-9]{1,5}|\[[0-9A-Fa-f:.]+\]:[0-9]{1,5})\Z",
        description="unix:PATH or HOST:PORT",
    ),
]

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

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class Cors(Section, frozen=True):
    """What pages of other sites may do in a browser. Names and defaults are those of vLLM's
    flags.
    """

    allowed_origins: Annotated[
        tuple[Text, ...],
        Option(
            "origins whose pages may read answers, such as https://chat.example.com; '*': all "
            "(default: none)",
            "LIST",
            "--allowed-origins",
        ),
    ] = ()
    """Origins whose pages may read answers; '*' means all."""

    allow_credentials: Annotated[
        bool,
        Option(
            "whether these pages may send cookies: true or false", "BOOL", "--allow-credentials"
        ),
    ] = False
    """Whether such pages may send credentials, such as cookies."""

    allowed_methods: Annotated[
        tuple[Text, ...],
        Option(
            "HTTP methods that these pages may use, such as GET,POST (default: all)",
            "LIST",
            "--allowed-methods",
        ),
    ] = ("*",)
    """Methods that they may use; '*' means all."""

    allowed_headers: Annotated[
        tuple[Text, ...],
        Option(
            "request headers that these pages may send, such as Authorization (default: all)",
            "LIST",
            "--allowed-headers",
        ),
    ] = ("*",)
    """Headers that they may send; '*' means all."""


class Listen(Section, frozen=True):
    """Where clients reach the proxy."""

    host: Annotated[
        Host, Option("address to listen on; 0.0.0.0: all of IPv4", "HOST", "--host")
    ] = "127.0.0.1"
    """Address to bind: a host name or an address, IPv6 without brackets. The default is the
    loopback, so that the proxy is open to a network only if you say so; 0.0.0.0 in a container.
    """

    port: Annotated[Port, Option("TCP port to listen on", "PORT", "--port")] = 8000
    """TCP port, 1 to 65535. The default of `vllm serve`, so that clients need no change."""

    uds: Annotated[
        File | None,
        Option(
            "Unix socket to listen on, in place of host and port; the umask says who may connect "
            "(default: TCP)",
            "PATH",
            "--uds",
        ),
    ] = None
    """Path of a Unix socket (--uds, as for vLLM), for a balancer on this machine: host and port are
    ignored then. Who may connect follows from the umask of the process: with 0022, its own user;
    with 0007, its group, too. A file that a dead process has left is replaced; one in use is an
    error. null: TCP.
    """

    root_path: Annotated[
        RootPath,
        Option(
            "the path below which a balancer serves this proxy, such as /llm; it may strip it or "
            "not (default: none)",
            "PATH",
            "--root-path",
        ),
    ] = ""
    """The path before all routes (--root-path, as for vLLM), such as /llm, if a balancer in front
    serves this proxy below it. It may strip the path or leave it: routes are found both ways.
    """

    workers: Annotated[
        Workers,
        Option(
            "processes that serve clients, each on one core at most",
            "N",
            "--workers",
        ),
    ] = 1
    """Processes that serve clients (--workers), 1 to 64: each uses one core at most. With several,
    one more process supervises them, starts one again that has ended, and holds the listening
    sockets; and one more, the scheduler process, chooses the engines of all requests, and probes
    engines. Places, keys' limits and metrics are those of all together; connections, and bytes of
    bodies and answers, are divided, with space for one of the largest in each.
    """

    keep_alive: Seconds = 75.0
    """Seconds until a client's connection without a request is closed (vLLM:
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE, 5). Longer than balancers in front keep theirs, for which 60 s is
    usual: otherwise they send requests on connections that are just being closed.
    """

    linger: Annotated[float, Meta(ge=0, le=604_800)] = 5.0
    """Seconds after SIGTERM in which new requests are still served while /ready says 503: balancers
    take that long to send no more. Then new requests are refused, and those in flight end
    (deadlines.drain). A second SIGTERM, or SIGINT, skips it. 0: none.
    """

    trusted_proxies: tuple[Text, ...] = ()
    """Addresses or networks of proxies in front of this one, such as [10.0.0.0/8]. For a request
    from one of them, the client is the last address in X-Forwarded-For that is not in this list.
    The header of other peers is ignored: a client could write any address. Clients share what is
    limited; a client is a key, or an address if no keys are set. "unix:" stands for all who connect
    to listen.uds: they have no address, and without it they are one client.
    """

    operator_routes: OperatorRoutes = "auto"
    """Who may see at this port what is for operators: /metrics, /load, /version, /docs,
    /openapi.json, and more of /ready, /ready/proxy, /drained and /healthcheck than their status
    (docs/reference/routes.md). It is always shown where the admin API listens.
      everywhere  everybody
      admin       whoever sends one of auth.admin_keys; others get 401, or 403 if there are no such
                  keys
      auto        admin if clients need a key or overload.tenant_header is set: then clients are
                  several. Otherwise everywhere
    """

    admin: Annotated[
        AdminAddress | None,
        Option(
            "where the admin API listens, for `pdproxy engines`: unix:PATH, or HOST:PORT "
            "(default: there is none)",
            "ADDRESS",
            "--admin",
        ),
    ] = None
    """Where the admin API listens (--admin), for `pdproxy engines` and others who list, add, drain
    and remove engines: unix:PATH, a socket that only the proxy's own user can open, or HOST:PORT.
    An address that is not of the loopback needs auth.admin_keys or auth.admin_keys_file, and has
    the TLS of listen.tls. null: there is no admin API.
    """

    tls: ListenTls = ListenTls()
    cors: Cors = Cors()


class Observe(Section, frozen=True):
    """The proxy's own log, and traces of requests."""

    log_level: Annotated[
        AtOnce[LogLevel],
        Option("lowest level that is written: debug, info, warning, error", "LEVEL", "--log-level"),
    ] = "info"
    """Lowest level that is written: debug, info, warning or error. No level contains prompts or
    keys.
    """

    log_format: Annotated[
        LogFormat, Option("text, or json: one object per line", "FORMAT", "--log-format")
    ] = "text"
    """text for people, json for a log collector: one object per line."""

    core_dumps: bool = False
    """Whether a process that crashes may leave a core dump, and other processes of the same user
    may read its memory (debuggers, py-spy). Its memory holds keys and prompts.
    """

    tracing: Tracing = Tracing()


class AdminPlace(NamedTuple):
    """Where the admin API is: the path of a Unix socket, or host and port; the others are None."""

    path: str | None
    host: str | None = None
    port: int | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"{UNIX}{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in str(self.host) else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.path is not None or is_loopback(str(self.host))


def place_of(address: str) -> AdminPlace:
    """Return the place that an address of the form `AdminAddress` names.

    Raises:
        ValueError: the port is none.
    """
    if address.startswith(UNIX):
        return AdminPlace(address.removeprefix(UNIX))
    host, _, port = address.rpartition(":")
    if not 0 < int(port) < 65_536:
        raise ValueError(f"no port is {port}")
    return AdminPlace(None, host.strip("[]"), int(port))


def check_admin(
    address: str | None, keys: Sequence[str], file: str | None, found: Mistakes
) -> None:
    """Check `listen.admin` with its keys (`auth.admin_keys` and the file of more)."""
    here = ("listen", "admin")
    if address is not None:
        try:
            place = place_of(address)
        except ValueError as error:
            found.add(here, f"listen.admin: {error}{found.source(here)}")
        else:
            if not place.is_local and not keys and file is None:
                text = (
                    "others than this machine can reach it: give it keys (auth.admin_keys or "
                    "auth.admin_keys_file)"
                )
                found.add(here, f"listen.admin: {place}: {text}{found.source(here)}")


def parsed_networks(texts: Iterable[str], where: str = "") -> tuple[Network, ...]:
    """Return the networks in `listen.trusted_proxies`; an address is a network of one. `where`: the
    source of the list.

    Raises:
        SettingsError: naming each text that is neither.
    """
    networks, found = [], Mistakes()
    for index, text in enumerate(texts):
        if text == UNIX:
            continue
        try:
            networks.append(read_network(text))
        except ValueError:
            path = ("listen", "trusted_proxies", index)
            words = (
                f"{quote(text)}: expected an address or a network, such as 10.0.0.0/8, or "
                f"{UNIX}{where}"
            )
            found.add(path, f"{spell_key(path)}: {words}")
    found.raise_any()
    return tuple(networks)
