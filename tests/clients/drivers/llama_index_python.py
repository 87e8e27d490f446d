# mypy: ignore-errors
"""LlamaIndex: a chat, a stream, tools, a structured answer, a completion."""

import json

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from shared import MODEL, QUESTION, SYSTEM, run


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


def tide_table(city: str) -> str:
    """The tides of a city."""
    return f"Noon at {city}."


TURNS = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=QUESTION)]


def made(url, **fields):
    fields = {"is_chat_model": True, "context_window": 8192, "max_retries": 0} | fields
    return OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="unused", **fields)


def chat(url):
    made(url).chat(TURNS)
    list(made(url, max_tokens=16).stream_chat(TURNS))


def completion(url):
    made(url, is_chat_model=False).complete(QUESTION)


def tools(url):
    model, turns = made(url, is_function_calling_model=True), list(TURNS)
    tool = FunctionTool.from_defaults(tide_table)
    for _ in range(3):
        answer = model.chat_with_tools([tool], chat_history=turns)
        turns.append(answer.message)
        for call in model.get_tool_calls_from_response(answer, error_on_no_tool_call=False):
            extra = {"tool_call_id": call.tool_id}
            said = json.dumps(call.tool_kwargs)
            turns.append(ChatMessage(role="tool", content=said, additional_kwargs=extra))


def structured(url):
    made(url, is_function_calling_model=True).as_structured_llm(Trip).chat(TURNS)


if __name__ == "__main__":
    run("llama-index", [chat, completion, tools, structured], "llama-index-llms-openai-like")
