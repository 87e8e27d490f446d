"""Example requests that the demo prints, with its port and model. Pure."""

from __future__ import annotations

import json
import shlex

from pdproxy.kit.addresses import reachable

QUESTION = "Why would anyone split prefill and decode?"


def url_of(host: str, port: int) -> str:
    """Return the URL under which a client on this machine reaches a server bound to `host`."""
    host = reachable(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def curl(url: str, model: str) -> str:
    """Return a shell command of one line: a streamed chat."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": 64,
        "stream": True,
    }
    data = shlex.quote(json.dumps(body))
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {data}"


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
        f"In a shell:\n\n{curl(url, model)}\n\n"
        f"In Python (pip install openai):\n\n{snippet(url, model)}\n\n"
        "Ctrl-C ends it.\n"
    )
