"""The table of requests whose answers must equal a plain engine's: it covers what changes a prompt,
a token or a byte.

A shape that the proxy sends to one engine alone names the reason; all others must move their
prompt's KV from P to D.
"""

from .prompts import CALL, CHAT, COMPLETIONS, TOOLS, USAGE, Body, Shape, question, story
from .shapes_chat import CHAT_SHAPES
from .shapes_completions import COMPLETION_SHAPES
from .shapes_refused import REFUSED_SHAPES

__all__ = [
    "CALL",
    "CHAT",
    "COMPLETIONS",
    "SHAPES",
    "TOOLS",
    "USAGE",
    "Body",
    "Shape",
    "question",
    "story",
]

SHAPES = [*COMPLETION_SHAPES, *CHAT_SHAPES, *REFUSED_SHAPES]
assert len({shape.name for shape in SHAPES}) == len(SHAPES)
