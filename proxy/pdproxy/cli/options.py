"""The options that are settings, shared by all commands that need settings.

Owns which option sets which key. Values are passed on as text: only the schema checks them, so that a wrong value gets the same
message wherever it came from.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from pdproxy.settings.load import POOL, EngineFlag, Flag, load
from pdproxy.settings.receivers import ReceiverFlag
from pdproxy.settings.schema import LogFormat, LogLevel, Pool, Role, Settings, Tokenize
from pdproxy.transfer import registry

_Option = tuple[str | tuple[str, ...], str, str, str | Callable[[], str]]
"""Its names, its value's name, the setting that it sets, and its help: a function if that lists contracts."""

_OPTIONS: tuple[_Option, ...] = (
    ("--host", "HOST", "listen.host", "address to listen on (default: 127.0.0.1)"),
    ("--port", "PORT", "listen.port", "port to listen on (default: 8000)"),
    ("--ssl-certfile", "FILE", "listen.tls.certificate", "certificate for TLS with clients, PEM (default: no TLS)"),
    ("--ssl-keyfile", "FILE", "listen.tls.key", "its private key (default: in the certificate's file)"),
    ("--ssl-ca-certs", "FILE", "listen.tls.client_ca", "clients must have a certificate of these authorities"),
    ("--api-keys-file", "FILE", "auth.api_keys_file", "file with the keys of clients, one per line"),
    ("--engine-api-key-file", "FILE", "auth.engine_api_key_file", "file with the engines' key"),
    (
        "--allowed-origins",
        "LIST",
        "listen.cors.allowed_origins",
        "web origins whose pages may read answers (default: none)",
    ),
    (
        "--allow-credentials",
        "BOOL",
        "listen.cors.allow_credentials",
        "whether such pages may send cookies (default: no)",
    ),
    ("--allowed-methods", "LIST", "listen.cors.allowed_methods", "methods that they may use (default: all)"),
    ("--allowed-headers", "LIST", "listen.cors.allowed_headers", "headers that they may send (default: all)"),
    (
        "--connector",
        "NAME",
        f"{POOL}connector",
        lambda: f"how KV is transferred: {', '.join(registry.names())} (default: {Pool().connector})",
    ),
    (
        "--tokenize",
        "WHEN",
        f"{POOL}tokenize",
        f"when to make prompts' token ids here: {', '.join(get_args(Tokenize))} (default: auto, where the connector needs them)",
    ),
    ("--tokenizer", "FOLDER", f"{POOL}tokenizer", "a model's folder with the tokenizer (default: the engines' own)"),
    (
        ("--kv-ready-host", "--nixl-proxy-host"),
        "HOST",
        "kv_ready.host",
        "address on which prefill engines report that KV is ready (default: 127.0.0.1)",
    ),
    (
        "--kv-notifier",
        "BOOL",
        "kv_ready.notifier",
        lambda: f"engines of connector {_with_notifier()} carry `pdproxy notifier` (default: false)",
    ),
    (("--kv-ready-port", "--nixl-proxy-port"), "PORT", "kv_ready.port", "its port (default: 7500)"),
    ("--max-inflight", "N", "limits.max_inflight", "requests that are served at once; others wait (default: 1024)"),
    ("--log-level", "LEVEL", "observe.log_level", f"{', '.join(get_args(LogLevel))} (default: info)"),
    ("--log-format", "FORMAT", "observe.log_format", f"{', '.join(get_args(LogFormat))} (default: text)"),
)
_RECEIVERS: tuple[_Option, ...] = (
    (
        ("--receiver-host", "--nixl-peer-host"),
        "HOST",
        "host",
        lambda: f"where the decode engine receives KV ({_with_receivers()}; default: its URL's host)",
    ),
    (
        ("--receiver-init-port", "--nixl-peer-init-port"),
        "PORTS",
        "init_ports",
        "LMCache's pd_peer_init_port, one per rank",
    ),
    (
        ("--receiver-alloc-port", "--nixl-peer-alloc-port"),
        "PORTS",
        "alloc_ports",
        "LMCache's pd_peer_alloc_port, one per rank; these three once for all decode engines, or once for each",
    ),
)
_ENGINES: dict[Role, str] = {
    "prefill": "engines that compute prompts",
    "decode": "engines that generate from them",
    "aggregated": "engines that do both",
}


def add_settings_options(parser: argparse.ArgumentParser) -> None:
    """Add all options that are settings to a command."""
    engines = parser.add_argument_group("engines", "added to those of the YAML file; host:port is enough")
    for role, purpose in _ENGINES.items():
        engines.add_argument(f"--{role}", metavar="URL", nargs="+", action="extend", default=[], help=purpose)
    group = parser.add_argument_group("settings", "options override PDPROXY_* variables, which override the file")
    group.add_argument("--config", metavar="FILE", type=Path, help="YAML file (default: PDPROXY_CONFIG, else none)")
    for names, metavar, key, words in _OPTIONS:
        group.add_argument(*_names(names), metavar=metavar, dest=key, help=_text(words))
    for names, metavar, field, words in _RECEIVERS:
        group.add_argument(*names, metavar=metavar, dest=f"receiver.{field}", action="append", help=_text(words))
    group.add_argument(
        "--stage-config",
        metavar="FILE",
        type=Path,
        help="vllm-omni's stage YAML: its prefill and decode stages are engines, with the URLs of that file or those given here",
    )


def _text(words: str | Callable[[], str]) -> str:
    return words if isinstance(words, str) else words()


def _with_notifier() -> str:
    """Return the names of the contracts whose engines may carry the notifier."""
    return ", ".join(entry.name for entry in registry.ENTRIES if "notifier" in entry.options.__struct_fields__)


def _with_receivers() -> str:
    """Return the names of the contracts that need to know where decode engines receive KV."""
    return ", ".join(entry.name for entry in registry.ENTRIES if entry.capabilities.needs_receiver)


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def settings_from(arguments: argparse.Namespace, *, need_engines: bool = True) -> Settings:
    """Return the settings of a parsed command line and the process's environment.

    Raises:
        SettingsError: what is wrong, in one line.
    """
    given = vars(arguments)
    flags = [Flag(_names(names)[0], key, given[key]) for names, _, key, _ in _OPTIONS if given[key] is not None]
    receivers = [
        ReceiverFlag(names[0], field, given[f"receiver.{field}"])
        for names, _, field, _ in _RECEIVERS
        if given[f"receiver.{field}"] is not None
    ]
    engines = [EngineFlag(role, url) for role in _ENGINES for url in given[role]]
    return load(
        arguments.config,
        os.environ,
        flags,
        engines,
        receivers=receivers,
        stage_config=arguments.stage_config,
        need_engines=need_engines,
    )
