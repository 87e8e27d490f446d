"""`/invocations`: SageMaker's route. A body that is surely a chat or a completion is read as one;
one engine reads all others.
"""

from __future__ import annotations

from pdproxy.wire.body_bounds import Bounds
from pdproxy.wire.fields import Fields
from pdproxy.wire.route_form import Alone, Reading, RouteForm
from pdproxy.wire.routes import openai
from pdproxy.wire.unusual import UnusualError


def read(_fields: Fields, _bounds: Bounds) -> Reading:
    """Leave the body to an engine: see `route_form.Read`."""
    raise UnusualError


FORM = RouteForm(
    path="/invocations",
    read=read,
    prompt_fields=("prompt", "tools", "messages"),
    listed={"prompt": b'"[', "prompt_embeds": b'"'},
    limits=("max_completion_tokens", "max_tokens"),
    unseen=openai.UNSEEN,
    prefill=openai.prefill,
    goes_whole=lambda alone: alone is Alone.UNUSUAL,
    has_own_words=True,
)
