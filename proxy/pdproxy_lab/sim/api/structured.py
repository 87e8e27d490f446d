"""Structured outputs in simple form: a few valid texts, of which the model generates one. Pure.

Owns the making of texts that fit a JSON schema, a regular expression or a list of choices. A real
engine may generate any text that fits. Here the answer is valid, depends on the KV, and takes
several tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from pdproxy_lab.sim.api.errors import EngineRefused
from pdproxy_lab.sim.api.protocol import GenerationBody
from pdproxy_lab.sim.language import mix
from pdproxy_lab.sim.request import Grammar
from pdproxy_lab.sim.tokenizer import EOS, BuiltInTokenizer

_VARIANTS = 6
_DEPTH = 12
_WORDS = ("river", "mountain", "harbour", "ledger", "lantern", "quay")


class TextGrammar:
    """One of some texts, then the end."""

    binds_thoughts = False

    def __init__(self, tokenizer: BuiltInTokenizer, texts: Iterable[str]) -> None:
        self._paths = list(
            dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        )

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        """Return the ids that may follow."""
        so_far, length = tuple(generated), len(generated)
        found = [
            path[length] if len(path) > length else EOS
            for path in self._paths
            if path[:length] == so_far
        ]
        return list(dict.fromkeys(found)) or [EOS]


class AllowedTokens:
    """`allowed_token_ids`."""

    binds_thoughts = True

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = ids

    def allowed(self, generated: Sequence[int]) -> Sequence[int]:
        """Return the ids that may follow."""
        return self._ids


def grammar_for(body: GenerationBody, tokenizer: BuiltInTokenizer) -> Grammar | None:
    """Return what a request's output must be; None: anything.

    Raises:
        EngineRefused: the schema or the expression is invalid.
    """
    if body.allowed_token_ids:
        return AllowedTokens(body.allowed_token_ids)
    wanted, form = body.structured_outputs, body.response_format
    if wanted is not None and wanted.choice is not None:
        if not wanted.choice:
            raise EngineRefused("Choice '[]' cannot be an empty list")
        return TextGrammar(tokenizer, wanted.choice)
    if wanted is not None and wanted.regex is not None:
        return TextGrammar(tokenizer, texts_of_regex(wanted.regex))
    schema: Any = None
    if wanted is not None and wanted.json_ is not None:
        schema = json.loads(wanted.json_) if isinstance(wanted.json_, str) else wanted.json_
    elif form is not None and form.type == "json_schema" and form.json_schema is not None:
        schema = form.json_schema.schema_ or {}
    elif (form is not None and form.type == "json_object") or (
        wanted is not None and wanted.json_object
    ):
        schema = {
            "type": "object",
            "properties": {"answer": {"type": "string"}},
            "required": ["answer"],
        }
    return None if schema is None else TextGrammar(tokenizer, texts_of_schema(schema))


def texts_of_schema(schema: Mapping[str, Any]) -> list[str]:
    """Return some texts that fit a JSON schema."""
    return [
        json.dumps(_value(schema, variant, schema, 0), ensure_ascii=False)
        for variant in range(_VARIANTS)
    ]


def _value(schema: Any, variant: int, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        found: Any = root
        for part in reference.removeprefix("#/").split("/"):
            found = found.get(part, {}) if isinstance(found, Mapping) else {}
        return _value(found, variant, root, depth + 1)
    if "const" in schema:
        return schema["const"]
    if options := schema.get("enum"):
        return options[variant % len(options)]
    for key in ("anyOf", "oneOf"):
        if options := schema.get(key):
            return _value(options[variant % len(options)], variant, root, depth + 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if isinstance(kind, list):
        kind = kind[variant % len(kind)]
    match kind:
        case "object":
            names = schema.get("properties", {})
            return {
                name: _value(one, variant + place, root, depth + 1)
                for place, (name, one) in enumerate(names.items())
            }
        case "array":
            count = max(schema.get("minItems", 1), 1)
            return [
                _value(schema.get("items", {}), variant + place, root, depth + 1)
                for place in range(count)
            ]
        case "string":
            if "pattern" in schema:
                return texts_of_regex(schema["pattern"])[variant % _VARIANTS]
            text = _WORDS[variant % len(_WORDS)]
            return text.ljust(schema.get("minLength", 0), "x")[: schema.get("maxLength", 1000)]
        case "integer" | "number":
            low = schema.get("minimum", 1)
            return min(low + variant, schema.get("maximum", low + variant))
        case "boolean":
            return variant % 2 == 0
        case "null":
            return None
    raise EngineRefused(f"Grammar error: Unsupported type {json.dumps(kind)}")


def texts_of_regex(pattern: str) -> list[str]:
    """Return some texts that a regular expression matches."""
    try:
        tree = _parser.parse(pattern)
        return [_matching(tree, mix(variant, 17)) for variant in range(_VARIANTS)]
    except (re.error, NotImplementedError, OverflowError) as error:
        raise EngineRefused(f"Grammar error: Failed to parse regex: {error}") from error


def _matching(tree: Iterable[tuple[Any, Any]], seed: int) -> str:
    parts = []
    for place, (kind, value) in enumerate(tree):
        seed = mix(seed, place)
        if kind is sre.LITERAL:
            parts.append(chr(value))
        elif kind is sre.NOT_LITERAL:
            parts.append("b" if value == ord("a") else "a")
        elif kind is sre.ANY:
            parts.append("abcxyz"[seed % 6])
        elif kind is sre.IN:
            parts.append(_one_of(value, seed))
        elif kind is sre.BRANCH:
            parts.append(_matching(value[1][seed % len(value[1])], seed))
        elif kind is sre.SUBPATTERN:
            parts.append(_matching(value[3], seed))
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            low, high, inner = value
            count = low + seed % (min(int(high), low + 3) - low + 1)
            parts += [_matching(inner, mix(seed, number)) for number in range(count)]
        elif kind is not sre.AT:
            raise NotImplementedError(f"unsupported construct {kind}")
    return "".join(parts)


def _one_of(options: Sequence[tuple[Any, Any]], seed: int) -> str:
    if options[0][0] is sre.NEGATE:
        excluded = re.compile(
            "[" + "".join(re.escape(chr(v)) for kind, v in options[1:] if kind is sre.LITERAL) + "]"
        )
        found = [
            char
            for char in "abcdefghijklmnop0123456789 "
            if len(options) == 1 or not excluded.match(char)
        ]
        return found[seed % len(found)]
    kind, value = options[seed % len(options)]
    if kind is sre.LITERAL:
        return chr(value)
    if kind is sre.RANGE:
        return chr(value[0] + seed % (value[1] - value[0] + 1))
    if kind is sre.CATEGORY:
        named = {
            sre.CATEGORY_DIGIT: "0123456789",
            sre.CATEGORY_SPACE: " ",
            sre.CATEGORY_WORD: "abcdefxyz_0123456789",
        }
        if value in named:
            return named[value][seed % len(named[value])]
    raise NotImplementedError(f"unsupported set {kind}")
