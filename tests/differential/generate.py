"""A generator of requests, from the plain to the absurd, that shrinks to the smallest one that
shows a difference.

A request is a route, a prompt, and a handful of features; each sets a few fields. Some have a fault
or two beside them, since which fault is named, and how, is part of an answer. Shrinking takes
features away, then makes their values simple. Temperature is 0 or has a seed: what is drawn by
chance can't be compared.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from hypothesis import strategies as st

from tests.differential.dialect import Dialect
from tests.differential.features import faults, features
from tests.differential.fields import ABSENT, CHAT, COMPLETIONS, Body, Fields
from tests.differential.prompts import headers, messages, prompts


@dataclass(frozen=True)
class Generated:
    """One request. `times`: how often it is sent, so that the last one finds its prompt cached."""

    path: str
    body: str
    headers: tuple[tuple[str, str], ...] = ()
    times: int = 1

    @property
    def shares_a_block(self) -> bool:
        """Whether it is a list of prompts of which two begin alike: which of them finds the other
        cached is chance.
        """
        body = json.loads(self.body)
        prompts = body.get("prompt")
        if not isinstance(prompts, list):
            return False
        if "truncate_prompt_tokens" in body:  # what is left may begin alike
            return True
        heads = [json.dumps(one)[:40] for one in prompts]
        return len(set(heads)) < len(heads)

    @property
    def wants_several(self) -> bool:
        """Whether it wants several answers to a prompt: which of them finds the others' blocks
        cached is chance.
        """
        return json.loads(self.body).get("n") not in (None, 1)

    def __repr__(self) -> str:
        head = "".join(f" -H '{name}: {value}'" for name, value in self.headers)
        return f"{self.times} x curl {self.path}{head} -d '{self.body}'"


def requests(dialect: Dialect) -> st.SearchStrategy[Generated]:
    """Any request."""
    return st.sampled_from((COMPLETIONS, CHAT)).flatmap(lambda path: _requests(dialect, path))


def _requests(dialect: Dialect, path: str) -> st.SearchStrategy[Generated]:
    prompt = messages(dialect) if path == CHAT else prompts(dialect)
    asked = _some(features(dialect, path), 5)
    wrong = st.sampled_from((0, 0, 0, 0, 1, 2)).flatmap(
        lambda most: _some(faults(dialect, path), most)
    )
    base: Body = {"model": dialect.model, "temperature": 0, "max_tokens": 6}
    streamed = st.sampled_from(
        ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}})
    )

    def made(
        parts: tuple[
            Body, tuple[Body, ...], tuple[Body, ...], tuple[tuple[str, str], ...], int, Body
        ],
    ) -> Generated:
        prompt, asked, wrong, lines, times, stream = parts
        body = base | stream | prompt
        for one in (*asked, *wrong):
            body |= one
        body = {name: value for name, value in body.items() if value is not ABSENT}
        if body["temperature"] and body.get("seed") is None:
            body["seed"] = 7
        return Generated(path, json.dumps(body, ensure_ascii=False), lines, times)

    return st.tuples(prompt, asked, wrong, headers(), st.sampled_from((1, 1, 1, 2)), streamed).map(
        made
    )


def _some(known: dict[str, Fields], most: int) -> st.SearchStrategy[tuple[Body, ...]]:
    """Up to so many of these, each once."""
    names = st.lists(st.sampled_from(sorted(known)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.tuples(*(known[name] for name in chosen)))
