"""Bytes that are almost right: parts of them changed, lost, doubled, moved."""

from __future__ import annotations

from hypothesis import strategies as st

_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["cut", "double", "replace", "insert", "move"]),
        st.integers(0, 1 << 16),
        st.integers(0, 40),
        st.one_of(
            st.binary(max_size=4),
            st.sampled_from([b"\r\n", b"\n\n", b'"', b"\\", b"data: [DONE]\n\n", b"\x00"]),
        ),
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    """Return data after some edits."""
    for kind, place, length, new in edits:
        at = place % (len(data) + 1)
        part = data[at : at + length]
        match kind:
            case "cut":
                data = data[:at] + data[at + length :]
            case "double":
                data = data[:at] + part + data[at:]
            case "replace":
                data = data[:at] + new + data[at + len(new) :]
            case "insert":
                data = data[:at] + new + data[at:]
            case _:
                data = data[:at] + data[at + length :] + part
    return data


def mutated(data: bytes) -> st.SearchStrategy[bytes]:
    """Almost these bytes."""
    return _EDITS.map(lambda edits: edited(data, edits))
