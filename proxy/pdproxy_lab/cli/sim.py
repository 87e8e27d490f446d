"""`pdproxy sim`: run one simulated engine until it is stopped."""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import signal
import ssl
import sys
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from pdproxy.cli.parser import USAGE_ERROR, examples
from pdproxy.engine_model.hardware import Hardware
from pdproxy.engine_model.profile import Profile, load, shipped
from pdproxy_lab.sim.facts import (
    CpuBuffer,
    ECTransferConfig,
    KvEventsConfig,
    LMCacheFacts,
    MooncakeFacts,
    Role,
    SimFacts,
)
from pdproxy_lab.sim.faults.book import PlannedFault, parse
from pdproxy_lab.sim.faults.kind import FaultError
from pdproxy_lab.sim.faults.kinds import KINDS
from pdproxy_lab.sim.faults.moments import MOMENTS

if TYPE_CHECKING:
    from pdproxy.cli.parser import Commands
    from pdproxy_lab.sim.server import SimServer

INTERRUPTED = 130
_Json = TypeVar("_Json", KvEventsConfig, ECTransferConfig)
_PORTS: dict[Role, int] = {
    "encode": 8400,
    "prefill": 8200,
    "decode": 8300,
    "aggregated": 8100,
    "any": 8100,
}
_ENGINE = {
    "model": "name of the model",
    "version": (
        "version that /version reports, and as which it answers (0.33.0 differs, "
        "docs/reference/versions.md)"
    ),
    "weights": "a whole number; engines with different weights generate different texts",
    "template": "chat template",
    "add_bos": "put the tokenizer's first token (BOS) before the prompt of a completion",
    "block_size": "tokens in a KV block",
    "num_gpu_blocks": "number of KV blocks",
    "max_model_len": "highest number of tokens of a prompt with its answer",
    "max_num_seqs": "highest number of requests in one step",
    "max_num_batched_tokens": "highest number of tokens in one step",
    "enable_prefix_caching": "keep the KV of prompts in a cache",
    "enable_prompt_tokens_details": "report in the usage how many prompt tokens were cached",
    "enable_force_include_usage": "report the usage in all streams, in each event and at the end",
    "enable_auto_tool_choice": "accept requests with tools",
    "enable_scale_out": "answer the routes that render and derender chats and generate token ids",
    "enable_cohere_api": "answer /cohere/v2/chat",
    "vision": "see pictures in chats, as a vision-language model",
    "speech": "answer /v1/audio/transcriptions and /v1/audio/translations, as a speech model",
    "realtime": "serve WebSockets on /v1/realtime, as a model of live speech",
    "enable_tokenizer_info_endpoint": "answer /tokenizer_info",
    "enable_server_load_tracking": "count the requests in flight for /load",
    "runtime_lora": (
        "load and unload LoRA adapters at /v1/load_lora_adapter and /v1/unload_lora_adapter"
    ),
    "reasoning_parser": "parser that separates thoughts from the answers of chats",
    "api_key": "key that clients must send (default: none)",
    "eos_every": "average number of tokens before an answer ends; 0: no end",
    "connector": "how KV is transferred",
    "engine_id": (
        "id of the engine for others, which a restart keeps (nixl-push) (default: a new one at "
        "each start)"
    ),
    "kv_role": "as in --kv-transfer-config (default: what --role and --connector need)",
    "tensor_parallel_size": "number of workers, each of which sends notices",
    "data_parallel_size": "number of data-parallel ranks; X-data-parallel-rank names one",
    "notify": (
        "where to send notices: tcp://HOST:PORT (nixl, lmcache-pd), http://HOST:PORT/PATH "
        "(lmcache-mp) (default: none)"
    ),
    "shared_storage_path": (
        "folder that engines share (shared, lmcache-mp, kvstore-keys); empty: each uses its own "
        "memory"
    ),
    "kv_load_failure_policy": "what happens to a request whose KV can't be loaded",
    "kv_lease_duration": "seconds for which a prefill engine keeps KV for a decode engine",
    "heartbeat_interval": "seconds between two renewals of a lease by a decode engine",
    "handshake_timeout": (
        "seconds for which a decode engine waits for a handshake with a prefill engine"
    ),
    "bidirectional_kv_xfer": (
        "decode: keep the KV of answers for the next turn; prefill: pull it (nixl)"
    ),
    "decoder_kv_blocks_ttl": "seconds for which a decode engine keeps that KV",
    "kv_recompute_threshold": "a prefill engine computes fewer tokens than that by itself",
    "side_channel_host": (
        "address of the NIXL side channel, which KV handles name; Mooncake: of its ports"
    ),
    "side_channel_port": "TCP port of the NIXL side channel; 0: any free one",
    "ec_side_channel_host": (
        "address at which consumers read a producer's encoder outputs, which answers name "
        "(ECCPUConnector)"
    ),
    "ec_side_channel_port": "TCP port of that address; 0: any free one",
    "register": "where to register: tcp://HOST:PORT (p2p-nccl, moriio) (default: nowhere)",
    "registered_as": "HTTP address to register, HOST:PORT; empty: where it listens",
    "registration_interval": "seconds between two heartbeats by which it registers",
    "kv_port": "TCP port for other engines (p2p-nccl, moriio); 0: any free one",
    "transfer_mode": "moriio: READ or WRITE",
    "defer_timeout": (
        "moriio: seconds for which a prefill engine keeps KV that no decode engine takes"
    ),
    "randomize_request_ids": "p2p-nccl: false is VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1",
}
_HARDWARE = {
    "speed": "factor by which everything is faster than real engines; 0: nothing takes time",
    "prefill_tokens_per_s": "prompt tokens per second",
    "chunk_base_s": "seconds of a step with prefill before its first token",
    "decode_step_s": "seconds of a step with one sequence",
    "decode_step_per_seq_s": "seconds that each further sequence adds",
    "weights_read_once": (
        "a step with prefill and decode takes the longer time of both, not the sum"
    ),
    "context_token_s": "seconds that each token of the decoding sequences adds to a step",
    "attention_s": "seconds that each pair of tokens compared by prefill adds to a step",
    "prompt_begin_s": "seconds that each prompt adds to its first step",
    "pull_s": "seconds that the first KV transfer that begins in a step adds to it",
    "further_pull_s": "seconds that each further one adds",
    "pull_token_s": "seconds that each token adds whose KV is transferred by these",
    "kv_bytes_per_token": "bytes of KV per token",
    "link_bytes_per_s": "bytes per second between engines",
    "transfer_latency_s": "seconds before a transfer's first byte",
    "transfers_in_line": "an engine receives the KV of one request after the other",
    "request_overhead_s": "seconds from the client to the engine's queue",
    "handoff_overhead_s": "seconds from a prefill engine's answer to the decode engine's queue",
    "response_overhead_s": "seconds from the end of a step to the client",
}
_LMCACHE = {
    "chunk_size": "tokens in a chunk",
    "pd_backend_mode": "which implementation of lmcache-pd",
    "pd_peer_init_port": "decode: its first worker's port for handshakes; 0: any free one",
    "pd_peer_alloc_port": "decode: its first worker's port for allocations; 0: any free one",
    "pd_buffer_size": "decode: bytes of each worker's receive buffer",
    "pd_allocation_timeout_sec": "decode: seconds that a push waits for space",
    "skip_last_n_tokens": "decode: number of a prompt's last tokens that are not looked up",
    "discard_partial_chunks": "prefill: push only full chunks",
    "save_only_first_rank": "only the first worker stores KV, as with MLA",
    "notice_type": "how notices are tagged",
    "degraded": "LMCache did not start: no KV moves, no notices are sent",
}
_CPU = {
    "cpu_host": "prefill: where it pushes KV to; decode: where it listens",
    "cpu_port": "TCP port of the decode engine; decode: 0 is any free one",
    "cpu_size": "GiB of the buffer of an engine",
}
_MOONCAKE = {
    "bootstrap_port": "prefill: TCP port of the bootstrap server; 0: any free one",
    "abort_request_timeout": (
        "prefill: seconds for which it keeps KV, and lets a decode engine wait for KV"
    ),
    "num_workers": (
        "prefill: half the number of questions of decode engines that it handles at once"
    ),
    "connector_timeout": "decode: seconds for which it waits for a bootstrap server",
}
_Group = SimFacts | Hardware | LMCacheFacts | CpuBuffer | MooncakeFacts
_GROUPS: tuple[tuple[str, type[_Group], dict[str, str]], ...] = (
    ("the engine (vLLM's names)", SimFacts, _ENGINE),
    ("its hardware (an H200 with an 8B model)", Hardware, _HARDWARE),
    ("LMCache (its names)", LMCacheFacts, _LMCACHE),
    ("connector cpu", CpuBuffer, _CPU),
    ("Mooncake (VLLM_MOONCAKE_... of vLLM)", MooncakeFacts, _MOONCAKE),
)
_EXAMPLES = examples(
    "pdproxy sim --role prefill",
    "pdproxy sim --role decode --port 8300 --fault reset@mid_stream:rate=0.1",
)
_NESTED: dict[type[_Group], str] = {
    Hardware: "hardware",
    LMCacheFacts: "lmcache",
    CpuBuffer: "cpu",
    MooncakeFacts: "mooncake",
}


def add(commands: Commands, summary: str) -> None:
    """Add the command. `summary`: what it does, in the list of all commands."""
    parser = commands.add_parser(
        "sim",
        help=summary,
        description="Run a simulated vLLM engine: its API, its KV transfer and its faults, without "
        "a "
        "model and a GPU.",
        usage="pdproxy sim [--role encode|prefill|decode|aggregated] [--port PORT] "
        "[--fault SPEC ...] "
        "[option ...]",
        epilog=f"{_faults_help()}\n\n{_EXAMPLES}",
    )
    parser.add_argument(
        "--role",
        metavar="ROLE",
        default="aggregated",
        help="encode, prefill, decode, aggregated or any (default: aggregated)",
    )
    parser.add_argument(
        "--host",
        metavar="HOST",
        default="127.0.0.1",
        help="address to listen on (default: 127.0.0.1)",
    )
    ports = ", ".join(f"{port} {role}" for role, port in _PORTS.items())
    parser.add_argument(
        "--port", metavar="PORT", help=f"TCP port to listen on; 0: any free one (default: {ports})"
    )
    parser.add_argument(
        "--admin-port",
        metavar="PORT",
        help="TCP port at which faults are armed while the engine runs; 0: any free one (default: "
        "none)",
    )
    parser.add_argument(
        "--ssl-certfile", metavar="FILE", help="certificate for TLS, PEM (default: no TLS)"
    )
    parser.add_argument(
        "--ssl-keyfile",
        metavar="FILE",
        help="the certificate's private key, PEM (default: in the certificate's file)",
    )
    parser.add_argument(
        "--seed", metavar="N", help="seed of all random draws (default: different in each run)"
    )
    parser.add_argument(
        "--fault",
        metavar="SPEC",
        action="append",
        default=[],
        help="fault to arm, such as reset@mid_stream:rate=0.1, see below; may be repeated",
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        help=f"measured engine to be like: {', '.join(shipped())}, or a file; options given "
        f"beside it win (default: none)",
    )
    parser.add_argument(
        "--kv-events-config",
        metavar="JSON",
        help="where to publish which KV blocks it has, as vLLM's option of this name (default: "
        "nowhere)",
    )
    parser.add_argument(
        "--ec-transfer-config",
        metavar="JSON",
        help="how encoder outputs are transferred, as vLLM's option of this name (default: not at "
        "all)",
    )
    for title, kind, words in _GROUPS:
        group = parser.add_argument_group(title)
        for name, annotation in _fields(kind).items():
            _add_option(group, name, annotation, words[name], getattr(kind(), name))
    parser.set_defaults(run=run)


def _faults_help() -> str:
    lines = [
        (
            "A fault is KIND[@MOMENT][:KEY=VALUE,...], such as reset@mid_stream:rate=0.1 or "
            "status@queued:next=3,status=503"
        )
    ]
    lines += [
        (
            "keys: next (number of requests; default 1), rate, seed, path, stream, releases, "
            "events, "
            "and the kind's own"
        ),
        "",
    ]
    width = max(map(len, KINDS))
    for name, kind in KINDS.items():
        own = "".join(f" {key}={str(value).lower()}" for key, value in kind.args.items())
        lines.append(
            f"  {name:{width}} {kind.summary}{f';{own}' if own else ''} (default: "
            f"{kind.moments[0]})"
        )
    return "\n".join([*lines, "", f"moments: {', '.join(MOMENTS)}"])


def _fields(kind: type[_Group]) -> dict[str, Any]:
    """Return the fields that are options, with their types."""
    hints = get_type_hints(kind)
    return {
        name: hints[name]
        for name in kind.__struct_fields__
        if name not in ("role", "kv_events", "ec_transfer_config", *_NESTED.values())
    }


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _choices(annotation: Any) -> tuple[str, ...]:
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((get_args(part) for part in parts if get_origin(part) is Literal), ())


def _add_option(group: Any, name: str, annotation: Any, words: str, default: Any) -> None:
    if annotation is bool:
        words = f"{words} (default: {'yes' if default else 'no'})"
        group.add_argument(
            _option(name), dest=name, action=argparse.BooleanOptionalAction, help=words
        )
        return
    words += f": {' or '.join(_choices(annotation))}" if _choices(annotation) else ""
    shown = f"{default:g}" if isinstance(default, float) else str(default) or "empty"
    words += f" (default: {shown})" if default is not None else ""
    group.add_argument(_option(name), dest=name, metavar="VALUE", help=words.replace("%", "%%"))


class _WrongOptionError(ValueError):
    """An option's value makes no sense. `str()` names the option."""


def _converted(name: str, text: Any, annotation: Any) -> Any:
    try:
        value = msgspec.convert(text, annotation, strict=False)
        if isinstance(value, float) and not math.isfinite(value):
            raise msgspec.ValidationError("no number")
        return value
    except msgspec.ValidationError as error:
        number = "a whole number" if "`int`" in str(error) else "a number"
        wanted = " or ".join(_choices(annotation)) or number
        raise _WrongOptionError(f"{_option(name)} must be {wanted}, got {text!r}") from None


def _port(name: str, text: str) -> int:
    port: int = _converted(name, text, int)
    if not 0 <= port <= 65535:
        raise _WrongOptionError(f"{_option(name)} must be 0 to 65535, got {port}")
    return port


def facts_from(arguments: argparse.Namespace) -> SimFacts:
    """Return the engine that a command line describes.

    Raises:
        ValueError: what is wrong, in one line that names the option.
    """
    given = vars(arguments)
    values: dict[str, Any] = {"role": _converted("role", arguments.role, Role)}
    if arguments.kv_events_config is not None:
        values["kv_events"] = _vllm_json(
            "--kv-events-config", arguments.kv_events_config, KvEventsConfig
        )
    if arguments.ec_transfer_config is not None:
        values["ec_transfer_config"] = _vllm_json(
            "--ec-transfer-config", arguments.ec_transfer_config, ECTransferConfig
        )
    if arguments.profile is not None:
        values |= _profile(arguments.profile).options()
    try:
        for _, kind, _ in reversed(_GROUPS):
            fields = _fields(kind).items()
            found = {
                name: _converted(name, given[name], hint)
                for name, hint in fields
                if given[name] is not None
            }
            if kind in _NESTED:
                name = _NESTED[kind]
                values[name] = msgspec.structs.replace(values.get(name, kind()), **found)
            else:
                values |= found
        return SimFacts(**values)
    except _WrongOptionError:
        raise
    except ValueError as error:  # it names fields; here they are options
        names = sorted(
            ("role", *_ENGINE, *_HARDWARE, *_LMCACHE, *_CPU, *_MOONCAKE), key=len, reverse=True
        )
        pattern = rf"\b({'|'.join(names)})\b(?= must| = )"
        raise ValueError(re.sub(pattern, lambda match: _option(match[1]), str(error))) from None


def _profile(name: str) -> Profile:
    try:
        return load(name)
    except ValueError as error:
        raise _WrongOptionError(f"--profile {error}") from None


def _vllm_json(option: str, text: str, kind: type[_Json]) -> _Json:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ValueError) as error:
        raise _WrongOptionError(f"{option} must be JSON as for vLLM: {error}") from None


def _fault(spec: str) -> PlannedFault:
    try:
        return parse(spec)
    except FaultError as error:
        raise _WrongOptionError(f"--fault {spec}: {error}") from None


def _tls(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    if certificate is None:
        if key is not None:
            raise _WrongOptionError("--ssl-keyfile needs --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:
        raise _WrongOptionError(
            f"--ssl-certfile {certificate}: can't be used: {error.strerror or error}"
        ) from None
    return context


def run(arguments: argparse.Namespace) -> int:
    """Run the engine; return the exit code: 0, 2 if it can't start, 130 at a second Ctrl-C."""
    try:
        facts = facts_from(arguments)
        port = _PORTS[facts.role] if arguments.port is None else _port("port", arguments.port)
        admin_port = (
            None if arguments.admin_port is None else _port("admin_port", arguments.admin_port)
        )
        seed = None if arguments.seed is None else _converted("seed", arguments.seed, int)
        faults = [_fault(spec) for spec in arguments.fault]
        tls = _tls(arguments.ssl_certfile, arguments.ssl_keyfile)
    except ValueError as error:
        sys.stderr.write(f"pdproxy sim: {error}\n")
        return USAGE_ERROR
    # Imported here: the server's libraries take a while to load, and wrong options should be
    # reported at once.
    import uvloop

    from pdproxy_lab.sim.server import SimServer

    async def serve() -> int:
        sim = SimServer(
            facts,
            host=arguments.host,
            port=port,
            faults=faults,
            admin_port=admin_port,
            chance=seed,
            tls=tls,
        )
        return await _serve(sim, facts)

    return uvloop.run(serve())


async def _serve(sim: SimServer, facts: SimFacts) -> int:
    requested, at_once = asyncio.Event(), asyncio.Event()

    def signalled(number: int) -> None:
        if requested.is_set() and number == signal.SIGINT:
            at_once.set()
        requested.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled, number)
    try:
        await sim.start()
    except OSError as error:
        where = f" on {error.filename}" if error.filename else ""
        sys.stderr.write(f"pdproxy sim: can't listen{where}: {error.strerror or error}\n")
        return USAGE_ERROR
    admin = f", admin on {sim.admin_url}" if sim.admin_url is not None else ""
    print(f"simulated {facts.role} engine of {facts.model!r} on {sim.url}{admin}", flush=True)
    await requested.wait()
    stopping = asyncio.create_task(sim.stop(), name="stop")
    hurried = asyncio.create_task(at_once.wait(), name="at once")
    await asyncio.wait({stopping, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    return 0 if stopping.done() else INTERRUPTED
