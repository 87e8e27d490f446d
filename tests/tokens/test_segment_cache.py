"""What is encoded in pieces is what would have been encoded whole, for every kind of tokenizer; the
cache keeps its bounds.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from pdproxy.tokens import segment_cache
from pdproxy.tokens.ids import TokenIds
from pdproxy.tokens.segment_cache import SegmentBoundaries, SegmentCache
from pdproxy.tokens.tokenizer import Tokenizer
from tests.tokens.models import KINDS, SPECIALS, WORDS, byte_level, model, stripping, words_alone

PARTS = [*WORDS, *SPECIALS, " ", "<think>", "\n\n", "hello " * 9]
TEXTS = st.lists(
    st.one_of(st.sampled_from(PARTS), st.sampled_from(SPECIALS), st.text(max_size=5)), max_size=60
).map("".join)


@pytest.fixture(autouse=True)
def _small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut wherever it is allowed, so that short texts have many segments."""
    monkeypatch.setattr(segment_cache, "MIN_SEGMENT", 1)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans())
def test_ids_are_those_of_the_whole(
    kind: Callable[[], Backend], texts: list[str], special: bool
) -> None:
    """Cold and warm, alone and behind what other texts left, with special tokens around it and
    without.
    """
    whole = copy.deepcopy(model(kind))
    made = Tokenizer(copy.deepcopy(model(kind)))
    for text in [*texts, "".join(texts), *texts]:
        wanted = whole(text, add_special_tokens=special)["input_ids"]
        found = made.completion(text, add_special_tokens=special)
        assert (found.numbers(), found.count) == (wanted, len(wanted)), text


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), fresh=st.integers(20, 200))
@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_beginning_has_the_ids_of_the_whole(texts: list[str], fresh: int) -> None:
    """As far as it is said to be known, cold and warm; and what was kept costs none of the fresh
    characters.
    """
    whole, made = copy.deepcopy(model(byte_level)), Tokenizer(copy.deepcopy(model(byte_level)))
    for text in [*texts, "".join(texts), *texts]:
        wanted = whole(text, add_special_tokens=False)["input_ids"]
        json, count, read, read_ids = made._segments.beginning(text, fresh)
        ids = TokenIds(b"[%b]" % json, count).numbers()
        assert len(ids) == count <= read_ids
        assert ids == wanted[:count]
        assert ids == wanted or read < len(text)
        made.completion(text, add_special_tokens=False)
    kept = [one for one in texts if len(list(made._segments._boundaries.segments(one))) == 1]
    for text in kept:
        assert made._segments.beginning(text, 0)[2] == len(text)


@given(texts=st.lists(TEXTS, min_size=2, max_size=2))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_text_that_begins_alike_is_cut_alike(texts: list[str]) -> None:
    """All segments of the beginning but its last are segments of the longer text, in the same
    places.
    """
    boundaries = SegmentBoundaries(byte_level_tokens())
    first, both = list(boundaries.segments(texts[0])), list(boundaries.segments("".join(texts)))
    assert "".join(both) == "".join(texts)
    assert (
        both[: len(first) - 1] == first[:-1] or "<|im_" in texts[0][-12:]
    )  # a token that only the longer text completes


def byte_level_tokens() -> list[Any]:
    return added(model(byte_level))


def added(tokenizer: Any) -> list[Any]:
    return list(tokenizer.backend_tokenizer.get_added_tokens_decoder().values())


def test_where_it_is_cut() -> None:
    """Before added tokens, the longest at each place; not before those that take or begin with
    white space.
    """
    boundaries = SegmentBoundaries(byte_level_tokens())
    assert list(boundaries.segments("a<|im_end|>xb<|im_c<s>")) == [
        "a",
        "<|im_end|>xb",
        "<|im_c",
        "<s>",
    ]
    boundaries = SegmentBoundaries(added(model(stripping)))
    assert list(boundaries.segments("a <s> b</s>c\n<|im_start|>  <|im_end|>")) == [
        "a <s> b</s>c\n<|im_start|>  ",
        "<|im_end|>",
    ]
    text = "a<s>b<s>c"
    assert list(SegmentBoundaries(added(model(words_alone))).segments(text)) == [text]
    assert list(SegmentBoundaries([]).segments(text)) == [text]


class _Counting:
    """An encoder that takes note of what it is given."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def __call__(self, texts: Any) -> list[list[int]]:
        self.given += texts
        return [[ord(letter) for letter in text] for text in texts]


def test_a_longer_conversation_costs_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns before are not encoded again, also where another conversation begins with them."""
    monkeypatch.setattr(segment_cache, "MIN_SEGMENT", 12)
    encode = _Counting()
    cache = SegmentCache(SegmentBoundaries(byte_level_tokens()), encode, 100_000)
    turns = [f"<|im_start|>turn {number} of a conversation<|im_end|>" for number in range(6)]
    cache.encode("".join(turns[:4]))
    encode.given.clear()
    json, count, kept = cache.encode("".join(turns))
    # its last token might have been the beginning of a longer one
    known = len("".join(turns[:4])) - len("<|im_end|>")
    assert "".join(encode.given) == "".join(turns)[known:]
    assert (count, kept) == (len("".join(turns)), known)
    assert json.count(b",") == count - 1


def test_what_is_kept_is_of_one_scope() -> None:
    """How long a tenant's text takes says nothing of what another one has sent."""
    encode = _Counting()
    cache = SegmentCache(SegmentBoundaries([]), encode, 2**20)
    text = "All ships that came in"
    kept = [cache.encode(text, scope)[2] for scope in (b"a", b"b", b"a", b"b", b"")]
    assert kept == [0, 0, len(text), len(text), 0]
    assert encode.given == [text] * 3


def test_the_cache_keeps_its_bound_and_what_was_used_last() -> None:
    """The least recently used go first; one text of more than a quarter is not kept at all."""
    encode = _Counting()
    cache = SegmentCache(SegmentBoundaries([]), encode, 4000)
    for number in range(50):
        cache.encode(f"text {number:03}")
        cache.encode("text 000")
        assert cache.size <= 4000
    encode.given.clear()
    cache.encode("text 000")
    cache.encode("text 049")
    assert encode.given == []
    cache.encode("text 001")
    assert encode.given == ["text 001"]
    size = cache.size
    cache.encode("x" * 2000)
    assert cache.size == size


def test_thousands_of_added_tokens_are_found_fast() -> None:
    """As Gemma has them, in a text full of their first letter: no search goes through all of them
    at each place.
    """
    import time

    class _Token:
        def __init__(self, content: str) -> None:
            self.content, self.single_word, self.lstrip, self.normalized = (
                content,
                False,
                False,
                False,
            )

    boundaries = SegmentBoundaries([_Token(f"<unused{number}>") for number in range(6000)])
    text = "<unuse <p><b>" * 40_000 + "<unused5999>"
    started = time.thread_time()  # a busy machine does not add to it
    assert list(boundaries.segments(text))[-1] == "<unused5999>"
    assert time.thread_time() - started < 5  # a tenth of that; going through all would be minutes


@given(
    text=st.lists(st.sampled_from([*SPECIALS, "x", "<|im_", "hello"]), max_size=60).map("".join),
    window=st.integers(1, 40),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_text_is_searched_in_windows(text: str, window: int) -> None:
    """None is longer than its bound, and what is found is what a search of the whole finds."""
    boundaries = SegmentBoundaries(byte_level_tokens())
    assert boundaries._pattern is not None
    wide = [(one.start(), one.group()) for one in boundaries._pattern.finditer(text)]
    seen: list[int] = []

    class Looking:
        """The pattern, and how much of the text it was shown at once."""

        def search(self, text: str, at: int, end: int) -> Any:
            seen.append(min(end, len(text)) - at)
            assert boundaries._pattern is not None
            return boundaries._pattern.search(text, at, end)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment_cache, "WINDOW", window)
        narrow = [(one.start(), one.group()) for one in boundaries._found(Looking(), text)]  # type: ignore[arg-type]
    assert narrow == wide
    assert max(seen, default=0) <= window + boundaries._longest
