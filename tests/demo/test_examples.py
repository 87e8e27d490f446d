"""What is printed to be pasted."""

import ast
import json
import shlex

from pdproxy_lab.up.examples import curl, snippet, url_of


def test_a_wildcard_address_is_reached_on_the_loopback() -> None:
    assert url_of("0.0.0.0", 8000) == "http://127.0.0.1:8000"
    assert url_of("::", 8000) == "http://[::1]:8000"
    assert url_of("::1", 8000) == "http://[::1]:8000"
    assert url_of("box", 1) == "http://box:1"


def test_curl_survives_any_model_name() -> None:
    for width in (None, 60):
        lines = curl("http://x:1", 'it\'s "mine" $HOME', width)
        *_, data = shlex.split("\n".join(lines))
        assert json.loads(data)["model"] == 'it\'s "mine" $HOME'
        assert width is None or max(map(len, lines)) <= 80


def test_the_snippet_is_python_for_any_model_name() -> None:
    assert 'it\'s "mine"' in {
        node.value
        for node in ast.walk(ast.parse(snippet("http://x:1", 'it\'s "mine"')))
        if isinstance(node, ast.Constant)
    }
