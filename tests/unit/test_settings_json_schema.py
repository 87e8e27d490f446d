"""The JSON Schema of the settings accepts a value of a setting if the program does."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pdproxy.cli.main import main
from pdproxy.settings.conform import conform, leaves
from pdproxy.settings.errors import SettingsError
from pdproxy.settings.json_schema import json_schema
from pdproxy.settings.pools import Pool
from pdproxy.settings.schema import Settings
from pdproxy.settings.section import Section

CONFIGS = Path(__file__).parents[2] / "configs"
VALUES: tuple[object, ...] = (
    *(None, True, False, -1, 0, 1, 0.5, 70_000, 10**12, [], ["x"], [""], {}, {"x": "y"}, {"x": ""}),
    *("", "x", "a b", "off", "auto", "nixl", "split", "least_load", "always", "none", "127.0.0.1"),
)


def is_accepted(value: object, kind: type[Section]) -> bool:
    try:
        conform(value, kind, "")
    except SettingsError:
        return False
    return True


@pytest.mark.parametrize("kind", [Settings, Pool], ids=lambda kind: kind.__name__)
def test_schema_and_program_accept_the_same_values(kind: type[Section]) -> None:
    schema = jsonschema.Draft202012Validator(json_schema(kind))
    accepted = refused = 0
    for path, _ in leaves(kind):
        for value in VALUES:
            tree: Any = value
            for name in reversed(path):
                tree = {name: tree}
            is_right = is_accepted(tree, kind)
            assert schema.is_valid(tree) == is_right, (path, value)
            accepted, refused = accepted + is_right, refused + (not is_right)
    assert min(accepted, refused) > 200


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"deadlines": {"drian": 5}}, "drian"),
        ({"pools": [{"nodes": [{"url": "http://10.0.0.1:8000"}]}]}, "role"),
        ({"pools": [None]}, "None"),
        ({"pools": [{"policy": "split-brain"}]}, "split-brain"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], key: str) -> None:
    error = jsonschema.exceptions.best_match(
        jsonschema.Draft202012Validator(json_schema(Settings)).iter_errors(settings)
    )
    assert key in error.message
    assert not is_accepted(settings, Settings)


def test_the_command_prints_what_fits_all_files_of_configs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    files = [*CONFIGS.glob("*.yaml")]
    assert len(files) > 2
    for file in files:
        jsonschema.validate(yaml.safe_load(file.read_text()), schema)
    empty = dict.fromkeys(("listen", "auth", "deadlines"))  # keys that are commented out
    jsonschema.validate(empty, schema)
