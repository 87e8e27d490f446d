"""Words that the generator's parts share."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Body = dict[str, Any]
Fields = st.SearchStrategy[Body]

ABSENT = object()
"""The value of a field that is left out."""
