"""Loading a folder, and the ids of whole requests, compared with what transformers makes."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdproxy.tokens.chat import Chat, read_chat
from pdproxy.tokens.errors import RejectedError, UnsureError, UnusableError
from pdproxy.tokens.ids import TokenIds, from_numbers
from pdproxy.tokens.tokenizer import Tokenizer, find, ids_of, load
from pdproxy.wire.request import parse
from pdproxy.wire.route import Route
from tests.tokens.models import TEMPLATE, byte_level, folder, model

FORMS: Any = {False: "string", True: "string"}


def chat(**fields: Any) -> Chat:
    """A chat of one message, or of those that the fields say."""
    body = {"messages": [{"role": "user", "content": "hello"}], **fields}
    return read_chat(
        {name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items()}
    )


def made(template: str | None = TEMPLATE) -> Tokenizer:
    """A tokenizer with a template."""
    return Tokenizer(copy.deepcopy(model(byte_level, template)))


def ids(tokenizer: Tokenizer, route: Route, **fields: Any) -> list[int]:
    """The ids of a request's body."""
    parsed = parse(route, msgspec.json.encode(fields))
    return ids_of(tokenizer, parsed, parsed.prompts[0], FORMS).numbers()


def test_a_folder_is_loaded(tmp_path: Path) -> None:
    """With its template; and by the name that an engine has for it."""
    path = str(folder(tmp_path))
    wanted = model(byte_level)("hello world")["input_ids"]
    for tokenizer in (load(path), find(path)):
        assert ids(tokenizer, Route.COMPLETIONS, prompt="hello world") == wanted
        assert "<|im_start|>user\nhello<|im_end|>" in tokenizer.rendered(chat(), "string")


def test_what_can_not_be_loaded(tmp_path: Path) -> None:
    """No folder, no tokenizer in it, a broken one: one line each, and nothing is asked of the
    network.
    """
    for path in (tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(UnusableError, match="is not a folder"):
            load(str(path))
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    for name in (str(tmp_path / "empty"), str(tmp_path / "broken"), "nobody/has-this-model"):
        with pytest.raises(UnusableError) as caught:
            find(name)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


def test_nothing_is_imported_before() -> None:
    """A proxy that doesn't tokenize has no transformers in memory; one that does has no torch."""
    code = (
        "import sys, pdproxy.app.compose as c\n"
        "from pdproxy.settings.engines import ConfiguredEngine\n"
        "from pdproxy.settings.pools import Pool\n"
        "from pdproxy.settings.schema import Settings\n"
        "nodes = (ConfiguredEngine(url='http://a:1', role='decode'),)\n"
        "c.Proxy.build(Settings(pools=(Pool(nodes=nodes),)))\n"
        "print([n for n in ('transformers', 'tokenizers', 'jinja2', 'torch') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "['jinja2']"), done.stdout


def test_templates_get_what_they_name(tmp_path: Path) -> None:
    """Arguments that a template doesn't read are not given to it; those of the body reach it."""
    tokenizer = made()
    assert "thinking: False" in tokenizer.rendered(
        chat(chat_template_kwargs={"enable_thinking": False}), "string"
    )
    assert "thinking: True" in tokenizer.rendered(chat(reasoning_effort="low"), "string")
    assert "Ledger" in tokenizer.rendered(chat(documents=[{"title": "Ledger"}]), "string")
    plain = tokenizer.rendered(chat(), "string")
    assert (
        tokenizer.rendered(
            chat(chat_template_kwargs={"message": 1, "unheard": 3, "self": 4, "conversations": 5}),
            "string",
        )
        == plain
    )
    assert tokenizer.rendered(chat(), "openai") == plain.replace("hello", "[hello]")
    assert (
        tokenizer.rendered(chat(add_generation_prompt=False), "string") + "<|im_start|>assistant\n"
        == plain
    )
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "It was "}]
    continued = chat(messages=begun, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.rendered(continued, "string").endswith("assistant\nIt was ")


def test_what_a_template_refuses() -> None:
    """By raising, or because what is to be continued is not there: the engine would refuse it. No
    client's word gets out.
    """
    tokenizer = made("{{ raise_exception('no ' + messages[0]['content']) }}")
    with pytest.raises(RejectedError) as caught:
        tokenizer.rendered(chat(), "string")
    assert "hello" not in str(caught.value)
    assert caught.value.__cause__ is None
    with pytest.raises(RejectedError):
        made().rendered(chat(continue_final_message=True), "string")  # both ways to end a prompt


@pytest.mark.parametrize("template", [None, "{{ strftime_now('%d') }}{{ messages }}"], ids=str)
def test_what_only_the_engine_knows(template: str | None) -> None:
    """Its own template where the model has none, and its clock."""
    with pytest.raises(UnsureError):
        made(template).rendered(chat(), "string")


def test_ids_of_requests() -> None:
    """A completion's text with the special tokens it asks for; a chat's without, unless it asks."""
    tokenizer, whole = made(), model(byte_level)
    assert ids(tokenizer, Route.COMPLETIONS, prompt="é 🦊\n") == whole("é 🦊\n")["input_ids"]
    bare = whole("é", add_special_tokens=False)["input_ids"]
    assert ids(tokenizer, Route.COMPLETIONS, prompt="é", add_special_tokens=False) == bare
    text = tokenizer.rendered(chat(), "string")
    body = {"messages": [{"role": "user", "content": "hello"}]}
    assert ids(tokenizer, Route.CHAT, **body) == whole(text, add_special_tokens=False)["input_ids"]
    assert ids(tokenizer, Route.CHAT, **body, add_special_tokens=True) == whole(text)["input_ids"]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x", "suffix": "y"},
        {"prompt": [1, 2]},
        {"prompt": "x", "truncation_side": "left"},
    ],
)
def test_completions_that_are_left_to_the_engines(fields: dict[str, Any]) -> None:
    """What has more to it than a text."""
    with pytest.raises(UnsureError):
        ids(made(), Route.COMPLETIONS, **fields)


def test_ids_are_json_and_numbers() -> None:
    """Both views of the same."""
    assert from_numbers([1, 23]) == TokenIds(b"[1,23]", 2)
    assert TokenIds(b"[1,23]", 2).numbers() == [1, 23]
    assert made().completion("", add_special_tokens=False) == TokenIds(b"[]", 0)


def test_special_tokens_that_are_left_in_the_text() -> None:
    """Some models split them like any text: then nothing is cut at them, and they are no tokens."""
    other = copy.deepcopy(model(byte_level))
    other.split_special_tokens = True
    text = "hello<|im_end|>world " * 40
    wanted = copy.deepcopy(other)(text)["input_ids"]
    assert Tokenizer(other).completion(text, add_special_tokens=True).numbers() == wanted
    assert wanted != model(byte_level)(text)["input_ids"]
