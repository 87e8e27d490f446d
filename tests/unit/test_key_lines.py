"""Lines of a file of clients' keys: names and limits, and no error that shows any part of a
line.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdproxy.settings.errors import SettingsError
from pdproxy.settings.keys import KeyLimits, KeyLine, read_key_lines


def read(tmp_path: Path, text: str) -> list[KeyLine]:
    path = tmp_path / "keys"
    path.write_text(text)
    return read_key_lines("auth.api_keys_file", str(path))


def test_keys_alone_are_as_before(tmp_path: Path) -> None:
    found = read(tmp_path, "# keys\n\n sk-one \nsk/two=+\n#sk-three\nsk-one\n")
    assert [(one.number, one.name, one.key, one.limits) for one in found] == [
        (3, None, "sk-one", KeyLimits()),
        (4, None, "sk/two=+", KeyLimits()),
        (6, None, "sk-one", KeyLimits()),
    ]


def test_names_and_limits(tmp_path: Path) -> None:
    """The key begins behind the first colon; a second key of a name shares its limits."""
    text = "a.B-c_9:sk:x inflight=20 rpm=600\ttpm=200000 weight=0.5 priority=-5..10\nb:k\nb:k2\n"
    found = read(tmp_path, text)
    assert [(one.name, one.key) for one in found] == [("a.B-c_9", "sk:x"), ("b", "k"), ("b", "k2")]
    assert found[0].limits == KeyLimits(20, 600, 200_000, 0.5, (-5, 10))
    assert found[1].limits == KeyLimits()


WRONG = {
    "secret-1 secret-2": "is no key of visible ASCII characters without blanks",
    "secret-1 rpm=5": "has words behind its key, and no name: expected name:key",
    ":secret-1": "has a wrong name before its colon",
    "secret/1:x": "has a wrong name before its colon",
    "-secret:x": "has a wrong name before its colon",
    f"{'n' * 65}:secret-1": "has a wrong name before its colon",
    "secret-1:": "is no key of visible ASCII",
    "secret-1: secret-2": "is no key of visible ASCII",
    "secret-1:sch\xfcssel": "is no key of visible ASCII",
    "schl\xfcssel": "is no key of visible ASCII",
    "n:secret-1 secret-2": (
        "has an unknown word behind its key: expected inflight, rpm, tpm, weight, priority, "
        "models, "
    ),
    "n:secret-1 RPM=5": "has an unknown word",
    "n:secret-1 rpm": "has an unknown word",
    "n:secret-1 secret-2=5": "has an unknown word",
    "n:secret-1 rpm=5 rpm=5": "gives rpm twice",
    "n:secret-1 rpm=0": "has a wrong rpm: expected a whole number, 1 or more",
    "n:secret-1 rpm=-1": "has a wrong rpm",
    "n:secret-1 rpm=": "has a wrong rpm",
    "n:secret-1 inflight=1.5": "has a wrong inflight",
    f"n:secret-1 tpm={'9' * 13}": "has a wrong tpm",
    "n:secret-1 tpm=secret-2": "has a wrong tpm",
    "n:secret-1 weight=0": "has a wrong weight: expected a number from 0.001 to 1000",
    "n:secret-1 weight=1001": "has a wrong weight",
    "n:secret-1 weight=inf": "has a wrong weight",
    "n:secret-1 weight=1e2": "has a wrong weight",
    "n:secret-1 priority=5": "has a wrong priority: expected the least and the greatest",
    "n:secret-1 priority=9..1": "has a wrong priority",
    f"n:secret-1 priority=0..{'9' * 19}": "has a wrong priority",
    "n:secret-1 # secret-2": "has an unknown word",
}


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_line_is_named_by_its_number_only(tmp_path: Path, line: str) -> None:
    """An operator who writes a key at the wrong place does not find it in a log."""
    with pytest.raises(SettingsError) as caught:
        read(tmp_path, f"ok:key\n{line}\n")
    message = str(caught.value)
    assert message.startswith("auth.api_keys_file: ")
    assert f": line 2 {WRONG[line]}" in message
    assert "\n" not in message
    assert "secret" not in message.replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:one rpm=5\na:two rpm=6", "line 2 has other limits than line 1, and the same name"),
        ("a:one rpm=5\na:two", "line 2 has other limits than line 1"),
        ("a:one\nb:one", "line 2 holds the same key as line 1, under another name"),
        ("one\nb:one", "line 2 holds the same key as line 1"),
    ],
)
def test_lines_that_contradict_each_other(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        read(tmp_path, text)


def test_a_name_may_have_several_keys(tmp_path: Path) -> None:
    """So that a key can be changed without a gap."""
    found = read(tmp_path, "a:one rpm=5\na:two rpm=5\na:one rpm=5")
    assert {one.limits for one in found} == {KeyLimits(rpm=5)}


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_no_text_makes_anything_but_keys_or_one_line(text: str) -> None:
    import tempfile

    with tempfile.NamedTemporaryFile() as file:
        file.write(text.encode())
        file.flush()
        try:
            found = read_key_lines("s", file.name)
        except SettingsError as error:
            lines = str(error).splitlines()
        else:
            lines = [""]
            assert all(one.key and one.key.isascii() and " " not in one.key for one in found)
        assert len(lines) == 1
