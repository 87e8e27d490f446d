"""Big inputs from small descriptions, so that a shape can be tried at any size, and a finding is a
few hundred bytes.

A recipe is a row of spans: fixed text, text that is repeated, and pairs of text that are nested.
Rendered at a size, the spans that grow share the bytes that the fixed ones leave. `@@` in a
repeated text becomes its number, so that names differ.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, replace
from typing import Any

NUMBER = "@@"
_WIDTHS = {"utf-16": 2, "utf-32": 4}
_VALUE = re.compile(r'(?<=[:\[,])("(?:[^"\\]|\\.)*"|-?\d[\d.eE+-]*|true|false|null)')
_MAX_TEXT = 4000
_MAX_GROWING = 6


@dataclass(frozen=True)
class Span:
    """Bytes as Latin-1 text. `kind`: text, many (repeated), open or close (nested: a `close`
    belongs to the `open` before it).
    """

    kind: str
    text: str

    @property
    def grows(self) -> bool:
        return self.kind in ("many", "open")


@dataclass(frozen=True)
class Recipe:
    """What an input is made of. `encoding`: of the whole, UTF-8 if None."""

    spans: tuple[Span, ...]
    encoding: str | None = None

    def render(self, size: int) -> bytes:
        """Return an input of about that many bytes."""
        if self.encoding is not None:
            size //= _WIDTHS.get(self.encoding, 1)
        growing = sum(span.grows for span in self.spans)
        fixed = sum(len(span.text) for span in self.spans if span.kind == "text")
        share = max(0, size - fixed) // max(1, growing)
        parts: list[bytes] = []
        depths: list[int] = []
        for at, span in enumerate(self.spans):
            text = span.text.encode("latin-1")
            match span.kind:
                case "many":
                    follows = self.spans[at + 1].text if at + 1 < len(self.spans) else ""
                    parts.append(_repeated(text, share, last=follows[:1] in "]}"))
                case "open":
                    depths.append(share // max(1, len(text) + self._closing(at)))
                    parts.append(text * depths[-1])
                case "close":
                    parts.append(text * (depths.pop() if depths else 0))
                case _:
                    parts.append(text)
        whole = b"".join(parts)
        return (
            whole
            if self.encoding is None
            else whole.decode(errors="replace").encode(self.encoding, "replace")
        )

    def _closing(self, at: int) -> int:
        return next((len(span.text) for span in self.spans[at + 1 :] if span.kind == "close"), 0)

    @property
    def shape(self) -> str:
        """What two recipes have in common that differ in words and numbers alone."""
        grown = [f"{span.kind}({_plain(span.text)})" for span in self.spans if span.kind != "text"]
        return f"{self.encoding or ''}{' '.join(grown)}"

    def as_json(self) -> dict[str, Any]:
        return {"encoding": self.encoding, "spans": [[span.kind, span.text] for span in self.spans]}

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Recipe:
        return cls(tuple(Span(kind, text) for kind, text in found["spans"]), found["encoding"])

    def __str__(self) -> str:
        return json.dumps(self.as_json())


def _repeated(unit: bytes, share: int, *, last: bool) -> bytes:
    """Return copies of a text; without the comma at the end where nothing follows that it could
    part.
    """
    if NUMBER.encode() in unit:
        before, _, behind = unit.partition(NUMBER.encode())
        fixed = len(before) + len(behind)
        # no more bytes than there are to share
        count = max(1, share // (fixed + len(f"{share // max(1, fixed):x}")))
        whole = b"".join([b"%b%x%b" % (before, number, behind) for number in range(count)])
    else:
        whole = unit * max(1, share // max(1, len(unit)))
    return whole[:-1] if last and whole.endswith(b",") else whole


def _plain(text: str) -> str:
    """Return a text with runs of letters and digits as one."""
    return re.sub(r"[a-zA-Z]+", "a", re.sub(r"\d+", "0", text))[:60]


def many(unit: str | bytes) -> Span:
    """Return a text that is repeated."""
    return Span("many", _text(unit))


def recipe(*parts: str | bytes | Span, encoding: str | None = None) -> Recipe:
    """Return a recipe of texts and spans."""
    spans = [part if isinstance(part, Span) else Span("text", _text(part)) for part in parts]
    return Recipe(tuple(spans), encoding)


def nested(before: str, opening: str, middle: str, closing: str, behind: str) -> Recipe:
    """Return a recipe of pairs in each other."""
    return recipe(
        before, Span("open", _text(opening)), middle, Span("close", _text(closing)), behind
    )


def _text(part: str | bytes) -> str:
    return (part.encode() if isinstance(part, str) else part).decode("latin-1")


@dataclass(frozen=True)
class Grammar:
    """What inputs of a kind are made of: where mutations begin, what is repeated, what is nested,
    what is put in.
    """

    seeds: tuple[Recipe, ...]
    units: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = ()
    words: tuple[str, ...] = ()
    json: bool = True


def mutated(one: Recipe, grammar: Grammar, chance: random.Random) -> Recipe:
    """Return a recipe that differs in one to three places."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        for _ in range(8):  # some mutations find nothing to change
            other = chance.choice(_MUTATIONS)(one, grammar, chance)
            if other is not None and _fits(other):
                one = other
                break
    return one


def _fits(one: Recipe) -> bool:
    growing = sum(span.grows for span in one.spans)
    return 0 < growing <= _MAX_GROWING and sum(len(span.text) for span in one.spans) < _MAX_TEXT


def _unit(grammar: Grammar, chance: random.Random) -> str:
    """Return something to be repeated: one of the grammar's, several in a row, or one in
    brackets.
    """
    unit = chance.choice(grammar.units).encode().decode("latin-1")
    match chance.randrange(6):
        case 0:
            return unit + chance.choice(grammar.units).encode().decode("latin-1")
        case 1 if grammar.json and unit.endswith(","):
            return f"[{unit[:-1]}],"
        case 2 if grammar.json and unit.endswith(",") and not unit.startswith('"k'):
            return f'"k{NUMBER}":{unit}'
    return unit


def _grow(one: Recipe, grammar: Grammar, chance: random.Random) -> Recipe | None:
    """Put a list, an object, a long text or a deep nest in a value's place."""
    texts = [at for at, span in enumerate(one.spans) if span.kind == "text"]
    places = (
        [(at, found) for at in texts for found in _VALUE.finditer(one.spans[at].text)]
        if grammar.json
        else []
    )
    if not places:
        return None
    at, found = chance.choice(places)
    text = one.spans[at].text
    unit = _unit(grammar, chance)
    spans: tuple[Span, ...]
    match chance.randrange(4):
        case 0 if grammar.pairs:
            opening, closing = chance.choice(grammar.pairs)
            spans = (Span("open", opening), Span("text", found[0]), Span("close", closing))
        case 1:
            piece = chance.choice(
                ("a", "\\n", "\\u0041", _text("é"), '\\"', "0", " ", _text("\u4e2d"))
            )
            spans = (Span("text", '"'), Span("many", piece), Span("text", '"'))
        case 2 if unit.endswith(","):
            named = unit if unit.startswith('"k') else f'"k{NUMBER}":{unit}'
            spans = (Span("text", "{"), Span("many", named), Span("text", "}"))
        case _:
            spans = (Span("text", "["), Span("many", unit), Span("text", "]"))
    return _put(one, at, text[: found.start()], spans, text[found.end() :])


def _repeat(one: Recipe, grammar: Grammar, chance: random.Random) -> Recipe | None:
    """Repeat a span of the text itself."""
    texts = [at for at, span in enumerate(one.spans) if len(span.text) > 1 and span.kind == "text"]
    if not texts:
        return None
    at = chance.choice(texts)
    text = one.spans[at].text
    begin = chance.randrange(len(text))
    end = min(len(text), begin + chance.choice((1, 2, 4, 8, 16, 64, 256)))
    return _put(one, at, text[:begin], (Span("many", text[begin:end]),), text[end:])


def _insert(one: Recipe, grammar: Grammar, chance: random.Random) -> Recipe | None:
    """Put something repeated, nested or fixed between two letters."""
    texts = [at for at, span in enumerate(one.spans) if span.kind == "text"]
    if not texts:
        return None
    at = chance.choice(texts)
    text = one.spans[at].text
    # Most places in a text are nowhere in particular: behind a bracket, a comma or a line's end is
    # somewhere.
    good = [found.end() for found in re.finditer(r"[\[{,\n:]", text)]
    place = (
        chance.choice(good) if good and chance.random() < 0.8 else chance.randrange(len(text) + 1)
    )
    new = Span("many", _unit(grammar, chance))
    if grammar.words and chance.random() < 0.3:
        new = Span("text", chance.choice(grammar.words).encode().decode("latin-1"))
    return _put(one, at, text[:place], (new,), text[place:])


def _change(one: Recipe, grammar: Grammar, chance: random.Random) -> Recipe | None:
    """Repeat something else, or more of it."""
    places = [at for at, span in enumerate(one.spans) if span.kind == "many"]
    if not places:
        return None
    at = chance.choice(places)
    text = one.spans[at].text
    match chance.randrange(4):
        case 0:
            text = _unit(grammar, chance)
        case 1:
            text += _unit(grammar, chance)
        case 2:
            place = chance.randrange(len(text) + 1)
            text = (
                text[:place]
                + chance.choice(grammar.words or grammar.units).encode().decode("latin-1")
                + text[place:]
            )
        case _:
            begin = chance.randrange(len(text))
            text = text[:begin] + text[begin + chance.choice((1, 1, 2, 4)) :] or text
    return replace(one, spans=(*one.spans[:at], Span("many", text), *one.spans[at + 1 :]))


def _drop(one: Recipe, grammar: Grammar, chance: random.Random) -> Recipe | None:
    """Leave something out that grows: what is left gets its bytes."""
    places = [at for at, span in enumerate(one.spans) if span.kind == "many"]
    if len(places) < 2:
        return None
    at = chance.choice(places)
    return replace(one, spans=one.spans[:at] + one.spans[at + 1 :])


def _encode(one: Recipe, grammar: Grammar, chance: random.Random) -> Recipe | None:
    if not grammar.json:
        return None
    return replace(one, encoding=chance.choice((None, None, "utf-16", "utf-32", "utf-8-sig")))


_MUTATIONS = (
    _grow,
    _grow,
    _grow,
    _repeat,
    _insert,
    _insert,
    _change,
    _change,
    _change,
    _drop,
    _encode,
)


def _put(one: Recipe, at: int, before: str, new: tuple[Span, ...], behind: str) -> Recipe:
    spans = (
        *one.spans[:at],
        Span("text", before),
        *new,
        Span("text", behind),
        *one.spans[at + 1 :],
    )
    return replace(one, spans=tuple(span for span in spans if span.text))
