"""The parts of requests: their prompts, the common fields of the table's rows, and functions that
make a row.

A body is made from a nonce that comes first in its prompt, so that no engine's prefix cache hides
an error. The chat template puts tools behind the messages for the same reason: a prompt without a
common beginning moves as a whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from .engine import MODEL

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Body = dict[str, Any]

# The values of `reason` in pdproxy_alone_total.
ALONE_N, ALONE_ECHO, ALONE_PROMPT_LOGPROBS = "n", "echo", "prompt_logprobs"
ALONE_SHORT = "short_prompt"
ALONE_BEAM, ALONE_UNUSUAL = "beam_search", "unusual"
ABSENT: Any = object()  # removes a field of the base from a row

STORY = (
    "The harbour master kept two ledgers. In the first she wrote every ship that came in, its "
    "cargo and its draught; "
    "in the second what left again, and when. Nobody had asked her to compare them, but on the "
    "last evening of each "
    "month she did, and where a barrel was missing she went down to the quay with a lantern and "
    "looked until she knew "
    "where it had gone. "
)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome", "Lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"Ask for the {name}.", "parameters": SCHEMA},
    }
    for name in ("forecast", "tide_table")
]
CALL = (
    r'<tool_call>\n\{"name": "forecast", "arguments": \{"city": "(Oslo|Rome)", "days": '
    r"[1-9]\}\}\n</tool_call>"
)
GRAMMAR = 'root ::= ship " " ship\nship ::= "brig" | "sloop" | "ketch"\n'
# Token ids of the tokenizer that tests/engines/make_model.py makes.
EOS, IM_START, IF = "1", "3", 300  # IF: " if"
FIRST_BYTE_OF_TWO, FIRST_BYTE_OF_FOUR = (
    132,
    177,
)  # 0xC3, 0xF0: text that ends after one of them has an incomplete character
SHIPS: dict[str, Any] = {"regex": "🚢{6}"}
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True},
}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
FORGED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[]],
    "remote_engine_id": "forged",
    "remote_request_id": "forged",
    "remote_host": "127.0.0.1",
    "remote_port": 9,
}


@dataclass(frozen=True)
class Shape:
    """One row: how the body is made from a nonce, and what to expect besides equality."""

    name: str
    path: str
    make: Callable[[str], Body]
    alone: str = ""  # the reason why one engine serves it, or one prompt of its list
    times: int = 1  # how often the proxy counts that reason
    partly: bool = False  # the list's other prompts are split
    status: int = 200
    header_id: bool = False  # send the nonce as X-Request-Id
    pinned_id: bool = False  # the answer's id must be the client's, so it is compared, too

    def __str__(self) -> str:
        return self.name

    @property
    def answers(self) -> int:
        """How many answers it wants to a prompt that two engines serve, if the connector can."""
        return 1 if self.alone else self.make("0").get("n") or 1


OWN = {field.name for field in fields(Shape)} - {"name", "path", "make"}


def _row(given: Body) -> tuple[Body, Body]:
    """Return the attributes of a shape, and the fields of its bodies without the prompt."""
    own = {key: given.pop(key) for key in OWN if key in given}
    base = {"model": MODEL, "temperature": 0, "max_tokens": 12} | given
    return own, {key: value for key, value in base.items() if value is not ABSENT}


def completion(name: str, /, prompt: Callable[[str], Any] | None = None, **given: Any) -> Shape:
    """Make a row of completions: greedy, twelve tokens, prompt `story`, unless the arguments change
    it.
    """
    own, base = _row(given)
    return Shape(
        name, COMPLETIONS, lambda nonce: base | {"prompt": (prompt or story)(nonce)}, **own
    )


def chat(name: str, /, messages: Callable[[str], Any] | None = None, **given: Any) -> Shape:
    """Make a row of chats, with the same rules."""
    own, base = _row(given)
    return Shape(
        name, CHAT, lambda nonce: base | {"messages": (messages or question)(nonce)}, **own
    )


def story(nonce: str) -> str:
    """Return a prompt of about 200 tokens."""
    return f"{nonce} {STORY}"


def question(nonce: str) -> list[Body]:
    """Return a chat of one message."""
    return [{"role": "user", "content": story(nonce)}]


def ids(nonce: str, length: int = 150) -> list[int]:
    """Return token ids that all depend on the nonce; none of them is special."""
    seed = int.from_bytes(nonce.encode()[-6:], "big")
    return [5 + (seed * (at + 1) * 2654435761 >> 7) % 4000 for at in range(length)]


def exactly(length: int) -> Callable[[str], list[int]]:
    """Return a function that makes prompts of `length` token ids."""
    return lambda nonce: ids(nonce, length)


def times(count: int) -> Callable[[str], str]:
    """Return a function that makes prompts of `count` stories, about 130 tokens each."""
    return lambda nonce: f"{nonce} {STORY * count}"


def talk(count: int) -> Callable[[str], list[Body]]:
    """Return a function that makes chats of one message with `count` stories."""
    return lambda nonce: [{"role": "user", "content": times(count)(nonce)}]


def begun(nonce: str) -> list[Body]:
    """Return a chat whose last message the model must continue."""
    return [*question(nonce), {"role": "assistant", "content": "It was"}]


def several(nonce: str) -> list[str]:
    """Return three prompts of different lengths."""
    return [f"{number} {nonce} {STORY[: 150 + 120 * number]}" for number in range(3)]


def conversation(nonce: str) -> list[Body]:
    """Return four turns: one of them in parts, one in several scripts."""
    return [
        {"role": "system", "content": f"{nonce} You keep the ledgers."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": STORY},
                {"type": "text", "text": "What was missing?"},
            ],
        },
        {"role": "assistant", "content": "A barrel."},
        {"role": "user", "content": "Où ça? 在哪里? 🚢"},
    ]


def tool_result(nonce: str) -> list[Body]:
    """Return a chat in which a tool was called and has answered."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "forecast", "arguments": '{"city": "Oslo", "days": 2}'},
    }
    return [
        *question(nonce),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain, then rain."},
    ]


def image(nonce: str) -> list[Body]:
    """Return a chat with an image, which these engines don't support."""
    pixel = (
        "data:image/png;base64,"
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5Er"
        "kJggg=="
    )
    parts = [
        {"type": "text", "text": story(nonce)},
        {"type": "image_url", "image_url": {"url": pixel}},
    ]
    return [{"role": "user", "content": parts}]
