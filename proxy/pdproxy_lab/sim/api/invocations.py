"""`/invocations`: SageMaker's route, which finds the API by the form of the body, as vLLM does for
a generating model.

Owns the reading of the body: the model is that of a header, and errors in JSON have words of their
own.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, ValidationError

from pdproxy_lab.sim.api.errors import RefusedRequest, response
from pdproxy_lab.sim.api.protocol import ChatBody, CompletionBody
from pdproxy_lab.sim.error_body import error_body

_ADAPTER = "x-amzn-sagemaker-adapter-identifier"


class _Session(StrEnum):
    NEW = "NEW_SESSION"
    CLOSE = "CLOSE"


class _SessionBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    requestType: _Session  # noqa: N815 - SageMaker's name


async def invoke(
    request: Request,
    chat: Callable[[ChatBody], Awaitable[Response]],
    complete: Callable[[CompletionBody], Awaitable[Response]],
) -> Response:
    """Answer one request by the route that its body fits.

    Raises:
        Refused: it fits none.
    """
    try:
        body = json.loads(await request.body())
    except json.JSONDecodeError as error:
        return response(error_body(f"JSON decode error: {error}", "Bad Request", 400), 400)
    except ValueError as error:
        raise RefusedRequest(str(error)) from None
    if isinstance(body, dict) and "requestType" in body:
        return response(error_body(_about_session(body), "Bad Request", 400), 400)
    try:
        _set_model(body, request.headers.get(_ADAPTER))
    except TypeError as error:
        raise RefusedRequest(str(error)) from None
    try:
        found = ChatBody.model_validate(body)
    except ValidationError:
        pass
    else:
        return await chat(found)
    try:
        prompts = CompletionBody.model_validate(body)
    except ValidationError:
        names = ["ChatCompletionRequest", "CompletionRequest"]
        raise RefusedRequest(
            f"Cannot find suitable handler for request. Expected one of: {names}"
        ) from None
    return await complete(prompts)


def _about_session(body: dict[str, Any]) -> str:
    try:
        _SessionBody.model_validate(body)
    except ValidationError as error:
        return error.json(include_url=False)
    return "Invalid payload. stateful sessions not enabled"


def _set_model(body: Any, adapter: str | None) -> None:
    if body is None or isinstance(body, int | float):
        "requestType" in body  # type: ignore[operator]  # noqa: B015 - vLLM's own mistake
    body["model"] = adapter
