"""Reads recordings: one exchange a file, or (`connector_*`) several, with the ports of the engines
that were asked.

A file begins with remarks (`#`), then comes the request behind `>>>` and the answer behind `<<<`;
chunked answers have lost their framing, requests that were no UTF-8 their bytes.
"""

import ast
import json
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.sim.shape import Seen

FOLDER = Path(__file__).parent
_CONNECTOR = re.compile(
    rb"^>>> (\w+) (http\S+) ?(\{.*?\})?\n(.*)\n<<< (\d+) after [\d.]+s\n(.*)$", re.MULTILINE
)

_SHORTENED = {"agg_models", "misc_models"}
"""Their `root`, a path of the machine that they were recorded on, has become `./model`."""


@dataclass(frozen=True)
class Sent:
    """A request."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def raw(self) -> bytes:
        """The request as it goes over the wire."""
        headers = {"host": "sim", **self.headers}
        if self.method == "POST":
            headers = {
                "content-type": "application/json",
                **headers,
                "content-length": str(len(self.body)),
            }
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode() + self.body

    def saying(self, body: Any) -> "Sent":
        """The same request with another body."""
        return Sent(self.method, self.path, self.headers, json.dumps(body).encode())


@dataclass(frozen=True)
class Exchange:
    """A request and its answer; `answer` is None where none came, `port` tells engines apart."""

    sent: Sent
    answer: Seen | None
    port: int = 0


def names() -> list[str]:
    """The names of all recordings."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def raw(name: str) -> bytes:
    """A recording as it is."""
    return (FOLDER / f"{name}.txt").read_bytes()


@cache
def read(name: str) -> Exchange:
    """A recording of one exchange."""
    data = re.sub(rb"\A(#.*\n)+", b"", raw(name))
    request, mark, answer = data.partition(b"\n<<< ")
    assert mark, f"{name}: no answer"
    sent = _request(request.removeprefix(b">>> "))
    if not answer.startswith(b"HTTP/1.1 "):
        assert answer.startswith((b"EXCEPTION TimeoutError", b"raw bytes")), (
            f"{name}: {answer[:40]!r}"
        )
        return Exchange(sent, None)
    head, _, body = answer.partition(b"\n\n")
    line, *fields = head.decode().split("\n")
    headers = _fields(fields)
    if "content-length" in headers:
        length = int(headers["content-length"])
        body, rest = body[:length], body[length:]
        assert len(body) == length or name in _SHORTENED, f"{name}: cut off"
        assert not rest.strip(), f"{name}: {rest[:40]!r} behind the body"
    else:
        body = body.rstrip(b"\n") + b"\n\n"
    return Exchange(sent, Seen(int(line.split()[1]), body, line, headers))


@cache
def read_all(name: str) -> list[Exchange]:
    """A recording of several exchanges, in their order."""
    data = raw(name)
    found = []
    for match in _CONNECTOR.finditer(data):
        url = urlsplit(match[2].decode())
        headers = ast.literal_eval(match[3].decode()) if match[3] else {}
        sent = Sent(match[1].decode(), url.path, headers, match[4])
        found.append(Exchange(sent, Seen(int(match[5]), match[6]), url.port or 0))
    assert len(found) == len(re.findall(rb"^>>> ", data, re.MULTILINE)), (
        f"{name}: an exchange could not be read"
    )
    return found


def _request(data: bytes) -> Sent:
    head, mark, body = data.partition(b"\n\n")
    if not mark:  # no headers were kept, the body follows at once
        head, _, body = data.partition(b"\n")
    first, *fields = head.decode().split("\n")
    method, target = first.split()
    # What was no UTF-8 was recorded as U+FFFD; no request that was, had one.
    body = body.rstrip(b"\n").replace("\ufffd".encode(), b"\xff")
    headers = {name: value for name, value in _fields(fields).items() if name != "host"}
    return Sent(method, urlsplit(target).path, headers, body)


def _fields(lines: list[str]) -> dict[str, str]:
    pairs = (line.partition(":") for line in lines if line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


@cache
def prefills() -> dict[str, Sent]:
    """The recorded requests to a prefill engine that left a handle, by the handle's request id."""
    found = {}
    for name in names():
        if name.startswith("pd"):
            one = read(name)
            if one.answer is not None and one.answer.status == 200 and not one.answer.streamed:
                handle = one.answer.json.get("kv_transfer_params")
                if handle:
                    found[handle["remote_request_id"]] = one.sent
    return found
