"""Are the answers right? 50 clients at once ask a proxy and a plain engine the same; a wrong KV
transfer makes them differ.

Usage: evaluate.py --proxy URL --plain URL [--questions FILE] [--limit 200] [--clients 50] [--tokens
64] [--tolerance 0]
       evaluate.py --simulated nixl [--limit 200] [--clients 50]

Each question is a greedy completion with a few solved questions before it, like lm_eval's gsm8k.
`--questions` is a file with one JSON object per line, `question` and `answer` (gsm8k's form: the
number behind `####`); without it, sums are made up. Three figures are printed: the share of answers
that are the plain engine's, and both shares that are right. The exit code is 1 if more than
`--tolerance` of the answers differ, or if a request fails. GPUs round differently in batches of
other sizes: there, compare the shares that are right, or allow some difference.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from simulated import CONNECTORS, stage

PATH = "/v1/completions"
EXAMPLES = 5
"""Solved questions before each one. They also make prompts of several KV blocks."""
TIMEOUT = 600.0
"""Seconds allowed for one answer."""
_NUMBER = re.compile(r"-?\d[\d,]*")


@dataclass(frozen=True)
class Question:
    """A text, and the number that answers it."""

    text: str
    number: str


def made_up(count: int) -> list[Question]:
    """Return sums in words, the same ones each time."""
    chance = random.Random(17)
    names, things = ("Ada", "Ben", "Cem", "Dora", "Eli"), ("apples", "books", "coins", "marbles")
    found = []
    for _ in range(count):
        first, more, less = chance.randint(20, 90), chance.randint(2, 60), chance.randint(1, 19)
        text = (
            f"{chance.choice(names)} has {first} {chance.choice(things)}, gets {more} more and "
            f"gives {less} away. "
            "How many are left?"
        )
        found.append(Question(text, str(first + more - less)))
    return found


def read(path: Path) -> list[Question]:
    """Read a file of questions. A wrong line ends the program."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            one = json.loads(line)
            found.append(
                Question(
                    str(one["question"]), last_number(str(one["answer"]).rpartition("####")[2])
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f"evaluate.py: {path}, line {number}: expected question and answer: {error!r}"
            ) from None
    return found


def last_number(text: str) -> str:
    """Return the last whole number of a text, without separators; empty if there is none."""
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else ""


def prompt_of(questions: list[Question], index: int) -> str:
    """Return a question behind solved ones, which are others for each question: no cache may hide a
    transfer.
    """
    others = [questions[(index + step) % len(questions)] for step in range(1, EXAMPLES + 1)]
    solved = [f"Question: {one.text}\nAnswer: {one.number}\n\n" for one in others]
    return "".join([*solved, f"Question: {questions[index].text}\nAnswer:"])


def first_number(text: str) -> str:
    """Return the first whole number of an answer, up to the next question."""
    found = _NUMBER.search(text.partition("Question:")[0])
    return found[0].replace(",", "") if found else ""


async def model_of(session: aiohttp.ClientSession, url: str) -> str:
    """Return the first model that a server serves."""
    async with session.get(f"{url}/v1/models") as answer:
        answer.raise_for_status()
        return str((await answer.json())["data"][0]["id"])


async def ask_all(
    url: str, prompts: list[str], clients: int, tokens: int, model: str
) -> list[str | None]:
    """Return the answers of a server, None where a request failed. `clients`: open requests at
    once.
    """
    found: list[str | None] = [None] * len(prompts)
    waiting = iter(range(len(prompts)))

    async def client(session: aiohttp.ClientSession) -> None:
        for index in waiting:
            body: dict[str, Any] = {
                "model": model,
                "prompt": prompts[index],
                "max_tokens": tokens,
                "temperature": 0,
            }
            try:
                async with session.post(url + PATH, json=body) as answer:
                    content = await answer.json()
                if answer.status != 200:
                    raise ValueError(f"{answer.status}: {content}")
                found[index] = content["choices"][0]["text"]
            except (aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
                print(f"question {index} at {url}: {error!r}"[:300], file=sys.stderr)

    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout
    ) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return found


async def evaluate(
    proxy: str, plain: str, questions: list[Question], clients: int, tokens: int
) -> dict[str, Any]:
    """Ask both servers everything; return the figures."""
    prompts = [prompt_of(questions, index) for index in range(len(questions))]
    async with aiohttp.ClientSession() as session:
        model = await model_of(session, proxy)
    answers, seconds = {}, {}
    for name, url in (("proxy", proxy), ("plain", plain)):
        begun = time.monotonic()
        answers[name] = await ask_all(url, prompts, clients, tokens, model)
        seconds[name] = round(time.monotonic() - begun, 2)
    pairs = list(zip(answers["proxy"], answers["plain"], strict=True))
    complete = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    right = {
        name: sum(
            first_number(text or "") == one.number
            for text, one in zip(found, questions, strict=True)
        )
        for name, found in answers.items()
    }
    return {
        "model": model,
        "questions": len(questions),
        "clients": clients,
        "failed": len(pairs) - len(complete),
        "same": sum(ours == theirs for ours, theirs in complete),
        "right": right,
        "seconds": seconds,
    }


def main() -> int:
    """Run; return 0 if the answers are those of the plain engine, within the tolerance."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--proxy", metavar="URL")
    parser.add_argument("--plain", metavar="URL")
    parser.add_argument("--simulated", metavar="CONNECTOR", choices=CONNECTORS)
    parser.add_argument("--questions", metavar="FILE", type=Path)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--tolerance", type=float, default=0.0)
    given = parser.parse_args()
    if given.simulated is None and (given.proxy is None or given.plain is None):
        parser.error("give --proxy and --plain, or --simulated")
    questions = (read(given.questions) if given.questions else made_up(given.limit))[: given.limit]
    if not questions:
        parser.error("no questions")
    with ExitStack() as stack:
        proxy, plain = given.proxy, given.plain
        if given.simulated is not None:
            made = stack.enter_context(stage(given.simulated))
            proxy, plain = made.proxy, made.plain
        urls = proxy.rstrip("/"), plain.rstrip("/")
        found = asyncio.run(evaluate(*urls, questions, given.clients, given.tokens))
    print(json.dumps(found))
    different = len(questions) - found["same"]
    print(
        f"{found['same']} of {len(questions)} answers are the plain engine's, {found['failed']} "
        f"requests failed"
    )
    print(
        f"right: {found['right']['proxy']} through the proxy, {found['right']['plain']} at the "
        f"plain engine"
    )
    return int(found["failed"] > 0 or different > given.tolerance * len(questions))


if __name__ == "__main__":
    sys.exit(main())
