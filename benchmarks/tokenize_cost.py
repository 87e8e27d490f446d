"""The cost of making a prompt's token ids in the proxy: CPU time per request by the prompt's
length, and memory.

Usage: tokenize_cost.py --model FOLDER [--tokens 100 1000 10000 100000] [--repeat 20]

Measured in one thread, from the request's fields to the JSON of its ids, as the proxy's thread does
it. The CPU time is that thread's, the median of the repeats. "Nothing cached" is an engine's way:
transformers renders and encodes the whole chat. A chat's turns have 200 tokens each. "One turn
more" is a known conversation with an answer and a question added. "First": what `auto` and `prefix`
wait for before they choose an engine, if no engine has more of the prompt than its first ids say.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

import stage
from pdproxy.tokens.chat import ContentFormat, conversation, read_chat
from pdproxy.tokens.ids import TokenIds
from pdproxy.tokens.tokenizer import Tokenizer, ids_of, load, prompt_text
from pdproxy.wire.request import Parsed, parse
from pdproxy.wire.route import Route

FORMS: dict[bool, ContentFormat] = {False: "string", True: "string"}
TURN = 200
COLUMNS = (
    "completion",
    "GIL held",
    "chat",
    "chat, nothing cached",
    "chat, one turn more",
    "completion, first",
    "chat, first",
    "chat, one turn more, first",
)


def rss() -> float:
    """Return this process's resident memory in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * stage.PAGE_KB / 1024


def text(number: int, words: int) -> str:
    """Return prose that differs for each number; random letters would not be typical."""
    source = " ".join(str(__doc__).split()).split(" ")
    return f"{number}. " + " ".join(source[(number + at) % len(source)] for at in range(words))


def median(make: Callable[[int], Any], work: Callable[[Any], object], repeat: int) -> float:
    """Return the median CPU time in ms of `work` on what `make` returns; `make` itself does not
    count.
    """
    times = []
    for at in range(repeat):
        given = make(at)
        began = time.thread_time()
        work(given)
        times.append(time.thread_time() - began)
    return 1000 * statistics.median(times)


def request(route: Route, **fields: Any) -> Parsed:
    """Return a request as the proxy reads it."""
    return parse(route, msgspec.json.encode({"model": "m", **fields}))


def talk(number: int, turns: int, words: int) -> list[dict[str, str]]:
    """Return a conversation of `turns` messages of `words` words."""
    return [
        {"role": "assistant" if at % 2 else "user", "content": text(number * 1000 + at, words)}
        for at in range(turns)
    ]


def measure(model: str, tokens: int, repeat: int) -> list[float]:
    """Return the row of one length, in ms."""
    tokenizer = load(model)
    per_word = tokenizer.completion(text(1, 1000), add_special_tokens=False).count / 1000
    turns, words = max(1, tokens // TURN), round(min(tokens, TURN) / per_word)

    def ids(parsed: Parsed) -> TokenIds:
        return ids_of(tokenizer, parsed, parsed.prompts[0], FORMS)

    def first(parsed: Parsed) -> object:
        text = prompt_text(tokenizer, parsed, parsed.prompts[0], FORMS)
        return tokenizer.beginning(text)

    def new(at: int, make: Callable[[int], Parsed]) -> Parsed:
        return make(at + repeat)  # of which the cache has nothing

    def completion(at: int) -> Parsed:
        return request(Route.COMPLETIONS, prompt=text(at, round(tokens / per_word)))

    def chat(at: int) -> Parsed:
        return request(Route.CHAT, messages=talk(at, turns, words))

    def longer(at: int) -> Parsed:
        messages = talk(at, turns + 2, words)
        ids(request(Route.CHAT, messages=messages[:turns]))
        return request(Route.CHAT, messages=messages)

    own = tokenizer._model  # noqa: SLF001 - the tokenizer that an engine uses
    own.model_max_length = sys.maxsize  # avoids a warning

    def whole(parsed: Parsed) -> object:
        messages = conversation(read_chat(parsed.fields).messages, "string", developer=True)
        shown = own.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return json.dumps(own(shown, add_special_tokens=False)["input_ids"])

    def written(given: Any) -> object:
        return msgspec.json.encode(given.ids)

    def encoding(at: int) -> Any:
        (made,) = own.backend_tokenizer.encode_batch_fast(
            [json.loads(bytes(completion(at).prompts[0].raw or b""))]
        )
        return made

    return [
        median(completion, ids, repeat),
        median(encoding, written, repeat),
        median(chat, ids, repeat),
        median(chat, whole, repeat),
        median(longer, ids, repeat),
        median(partial(new, make=completion), first, repeat),
        median(partial(new, make=chat), first, repeat),
        median(partial(new, make=longer), first, repeat),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="a model's folder with tokenizer and chat template"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[100, 1000, 10_000, 100_000])
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    before = rss()
    tokenizer: Tokenizer = load(options.model)
    print(
        f"{tokenizer!r}; memory {before:.0f} MB before, {rss():.0f} MB with it; Python "
        f"{sys.version.split()[0]}\n"
    )
    print(
        f"| tokens | {' | '.join(f'{name}, ms' for name in COLUMNS)} |\n"
        f"|{'---|' * (len(COLUMNS) + 1)}"
    )
    for tokens in options.tokens:
        row = measure(options.model, tokens, options.repeat)
        print(f"| {tokens:,} | {' | '.join(f'{value:.2f}' for value in row)} |", flush=True)


if __name__ == "__main__":
    main()
