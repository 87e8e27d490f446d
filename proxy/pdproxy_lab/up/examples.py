"""Example requests that `up` and the demo print, with their port and model. Pure."""

from __future__ import annotations

import json
import shlex

from pdproxy.kit.addresses import reachable

QUESTION = "Why would anyone split prefill and decode?"


def url_of(host: str, port: int) -> str:
    """Return the URL under which a client on this machine reaches a server bound to `host`."""
    host = reachable(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def curl(url: str, model: str, width: int | None = None) -> list[str]:
    """Return a shell command, a streamed chat, in lines that can be pasted together.

    `width`: columns that a line has at most; None: one line. A line that can't be broken is longer.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 64,
        "stream": True,
    }
    # each line of the JSON ends where white space is allowed, so a line of the command may, too
    parts = [shlex.quote(part)[1:-1] if "'" in part else part for part in _parts(body)]
    parts[0], parts[-1] = f"-d '{parts[0]}", f"{parts[-1]}'"
    address = url.removeprefix("http://")
    lines = [f"curl -N {address}/v1/chat/completions"]
    for number, part in enumerate(["-H content-type:application/json", *parts]):
        in_quotes = number > 1
        if width is None or len(lines[-1]) + 1 + len(part) + 2 <= width:
            lines[-1] += f" {part}"
            continue
        lines[-1] += "" if in_quotes else " \\"
        lines.append(f"  {part}")
    return lines


def _parts(body: object) -> list[str]:
    """Return the lines of a JSON text between which there is white space."""
    parts: list[str] = []
    for line in json.dumps(body, indent=0).splitlines():
        if parts and (parts[-1][-1] in "{[" or line[0] in "]}"):
            parts[-1] += line
        else:
            parts.append(line)
    return parts


def snippet(url: str, model: str) -> str:
    """Return a Python program that does the same with OpenAI's library."""
    return "\n".join(
        (
            "from openai import OpenAI",
            f'client = OpenAI(base_url="{url}/v1", api_key="none")',
            f"messages = [{{'role': 'user', 'content': {QUESTION!r}}}]",
            (
                f"chat = client.chat.completions.create(model={model!r}, messages=messages, "
                f"max_tokens=64, stream=True)"
            ),
            "for chunk in chat:",
            '    print(chunk.choices[0].delta.content or "", end="", flush=True)',
        )
    )


def greeting(url: str, model: str, engines: str, seconds: float) -> str:
    """Return what is printed once the proxy can serve."""
    return (
        f"pdproxy is ready after {seconds:.1f} s: {url}\n"
        f"  {engines}, model {model}\n\n"
        f"In a shell:\n\n{curl(url, model)[0]}\n\n"
        f"In Python (pip install openai):\n\n{snippet(url, model)}\n\n"
        "Ctrl-C ends it.\n"
    )
