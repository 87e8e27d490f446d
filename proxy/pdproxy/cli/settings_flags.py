"""The table of options that are settings, in groups by purpose.

Owns names and help of these options, and which key each one sets. Each help states unit, default and, where the form is not
obvious, an example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pdproxy.scheduling import placements, policies
from pdproxy.settings.load import POOL
from pdproxy.settings.policy import PoolPolicy
from pdproxy.settings.schema import Pool, Role
from pdproxy.transfer import registry

RECEIVER = "receiver."
"""The beginning of an option's key, if it sets a field of the decode engines' `receiver`."""


class SettingFlag(NamedTuple):
    """An option that sets one key. The first name is that of errors; a help that lists contracts is a function."""

    names: tuple[str, ...]
    metavar: str
    key: str
    help: str | Callable[[], str]


class FlagGroup(NamedTuple):
    """A group of the help: its title, a sentence below it (or nothing), and its options.

    `receivers`: the options set a field of the decode engines' `receiver`, and may be given once for each engine.
    """

    title: str
    about: str | None
    flags: tuple[SettingFlag, ...]
    receivers: bool = False


ENGINES: dict[Role, str] = {
    "prefill": "engines that compute prompts: http://HOST:PORT, https://HOST:PORT or HOST:PORT (http); "
    "dns://NAME:PORT, srv://NAME: all that DNS names",
    "decode": "engines that generate answers from the KV of prefill engines: as for --prefill",
    "aggregated": "engines that compute prompts and generate answers: as for --prefill",
    "any": "engines that do all of this, each for some requests (kv_role kv_both): as for --prefill",
}


def _connectors() -> str:
    return (
        f"how KV is transferred, as the engines are configured: {', '.join(registry.names())}; auto: ask the engines "
        f"(default: {Pool().connector})"
    )


def _policies() -> str:
    return (
        f"who serves a request: a placement ({', '.join(placements.names())}), or a policy for all legs "
        f"({', '.join(policies.names())}) "
        f"(default: {placements.AUTO} where it has something to decide by, else {PoolPolicy().prefill})"
    )


def _notifier() -> str:
    names = ", ".join(entry.name for entry in registry.ENTRIES if "notifier" in entry.options.__struct_fields__)
    return (
        f"whether the engines of connector {names} carry the file of `pdproxy notifier`: true or false (default: false)"
    )


def _registration() -> str:
    names = " and ".join(entry.name for entry in registry.ENTRIES if entry.registration_port)
    return f"address on which engines register, for {names} (default: 127.0.0.1)"


def _receivers() -> str:
    names = ", ".join(entry.name for entry in registry.ENTRIES if entry.capabilities.needs_receiver)
    return f"only {names}: address where a decode engine receives KV, LMCache's pd_peer_host (default: its URL's host)"


def _flag(name: str, metavar: str, key: str, words: str | Callable[[], str], *others: str) -> SettingFlag:
    return SettingFlag((name, *others), metavar, key, words)


GROUPS: tuple[FlagGroup, ...] = (
    FlagGroup(
        "listening and TLS",
        None,
        (
            _flag("--host", "HOST", "listen.host", "address to listen on; 0.0.0.0: all of IPv4 (default: 127.0.0.1)"),
            _flag("--port", "PORT", "listen.port", "TCP port to listen on (default: 8000)"),
            _flag(
                "--uds",
                "PATH",
                "listen.uds",
                "Unix socket to listen on, in place of host and port; the umask says who may connect (default: TCP)",
            ),
            _flag(
                "--root-path",
                "PATH",
                "listen.root_path",
                "the path below which a balancer serves this proxy, such as /llm; it may strip it or not (default: none)",
            ),
            _flag(
                "--workers",
                "N",
                "listen.workers",
                "processes that serve clients, each on one core at most; some settings work with one only (default: 1)",
            ),
            _flag(
                "--admin",
                "ADDRESS",
                "listen.admin",
                "where the admin API listens, for `pdproxy engines`: unix:PATH, or HOST:PORT (default: there is none)",
            ),
            _flag(
                "--ssl-certfile",
                "FILE",
                "listen.tls.certificate",
                "the server's certificate with its chain, PEM; turns on TLS (default: no TLS)",
            ),
            _flag(
                "--ssl-keyfile",
                "FILE",
                "listen.tls.key",
                "the certificate's private key, PEM (default: in the certificate's file)",
            ),
            _flag(
                "--ssl-ca-certs",
                "FILE",
                "listen.tls.client_ca",
                "authorities, PEM: clients must have a certificate from one of them (default: clients need none)",
            ),
        ),
    ),
    FlagGroup(
        "keys",
        "Files are read again when they change. A key itself is given by a variable, PDPROXY_AUTH__API_KEYS=KEY1,KEY2.",
        (
            _flag(
                "--api-keys-file",
                "FILE",
                "auth.api_keys_file",
                "the keys that clients may send, one per line (default: no key is checked here)",
            ),
            _flag(
                "--admin-keys-file",
                "FILE",
                "auth.admin_keys_file",
                "the keys for the admin API, one per line (default: a Unix socket and the loopback need none)",
            ),
            _flag(
                "--engine-api-key-file",
                "FILE",
                "auth.engine_api_key_file",
                "the one key that the engines were started with (default: none)",
            ),
        ),
    ),
    FlagGroup(
        "browsers (CORS)",
        'A LIST is A,B or, as for vLLM, JSON: \'["A", "B"]\'.',
        (
            _flag(
                "--allowed-origins",
                "LIST",
                "listen.cors.allowed_origins",
                "origins whose pages may read answers, such as https://chat.example.com; '*': all (default: none)",
            ),
            _flag(
                "--allow-credentials",
                "BOOL",
                "listen.cors.allow_credentials",
                "whether these pages may send cookies: true or false (default: false)",
            ),
            _flag(
                "--allowed-methods",
                "LIST",
                "listen.cors.allowed_methods",
                "HTTP methods that these pages may use, such as GET,POST (default: all)",
            ),
            _flag(
                "--allowed-headers",
                "LIST",
                "listen.cors.allowed_headers",
                "request headers that these pages may send, such as Authorization (default: all)",
            ),
        ),
    ),
    FlagGroup(
        "KV transfer",
        None,
        (
            _flag("--connector", "NAME", f"{POOL}connector", _connectors),
            _flag("--kv-notifier", "BOOL", "kv_ready.notifier", _notifier),
            _flag(
                "--kv-ready-host",
                "HOST",
                "kv_ready.host",
                "address on which the proxy takes the engines' notices that KV is ready (default: 127.0.0.1)",
                "--nixl-proxy-host",
            ),
            _flag(
                "--kv-ready-port",
                "PORT",
                "kv_ready.port",
                "TCP port on which the proxy takes these notices (default: 7500)",
                "--nixl-proxy-port",
            ),
            _flag(
                "--registration-host",
                "HOST",
                "registration.host",
                _registration,
            ),
            _flag(
                "--registration-port",
                "PORT",
                "registration.port",
                "TCP port on which they register (default: that of vLLM's examples)",
            ),
        ),
    ),
    FlagGroup(
        "receivers of KV",
        "Each option once for all decode engines, or once for each, in their order.",
        (
            _flag("--receiver-host", "HOST", f"{RECEIVER}host", _receivers, "--nixl-peer-host"),
            _flag(
                "--receiver-init-port",
                "PORTS",
                f"{RECEIVER}init_ports",
                "LMCache's pd_peer_init_port: one TCP port per tensor-parallel rank, such as 7300,7301 (default: none)",
                "--nixl-peer-init-port",
            ),
            _flag(
                "--receiver-alloc-port",
                "PORTS",
                f"{RECEIVER}alloc_ports",
                "LMCache's pd_peer_alloc_port: one TCP port per tensor-parallel rank, such as 7400,7401 (default: none)",
                "--nixl-peer-alloc-port",
            ),
        ),
        receivers=True,
    ),
    FlagGroup(
        "tokenizing",
        None,
        (
            _flag(
                "--tokenize",
                "WHEN",
                f"{POOL}tokenize",
                "when the proxy makes the token ids of prompts: off; auto: where the connector needs them; always: also to save "
                "engines this work (default: auto)",
            ),
            _flag(
                "--tokenizer",
                "FOLDER",
                f"{POOL}tokenizer",
                "folder of a model with its tokenizer (default: the model that the engines report, if it is on this machine)",
            ),
        ),
    ),
    FlagGroup(
        "choosing engines",
        None,
        (_flag("--policy", "NAME", f"{POOL}policy", _policies),),
    ),
    FlagGroup(
        "limits",
        None,
        (
            _flag(
                "--max-inflight",
                "N",
                "limits.max_inflight",
                "requests that are served at once; more requests wait (default: 1024)",
            ),
        ),
    ),
    FlagGroup(
        "logs",
        None,
        (
            _flag(
                "--log-level",
                "LEVEL",
                "observe.log_level",
                "lowest level that is written: debug, info, warning, error (default: info)",
            ),
            _flag("--log-format", "FORMAT", "observe.log_format", "text, or json: one object per line (default: text)"),
        ),
    ),
)
