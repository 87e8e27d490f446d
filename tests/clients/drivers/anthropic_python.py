# mypy: ignore-errors
"""anthropic, the Python library: Messages."""

from anthropic import Anthropic
from pydantic import BaseModel
from shared import CITY, MODEL, PIXEL, QUESTION, SYSTEM, run

USER = {"role": "user", "content": QUESTION}
KEPT = {"cache_control": {"type": "ephemeral"}}
TOOL = {"name": "tide_table", "description": "The tides of a city.", "input_schema": CITY}


class Trip(BaseModel):
    city: str
    days: int


def made(url):
    return Anthropic(base_url=url, api_key="unused", max_retries=0)


def message(url, **fields):
    fields = {"model": MODEL, "max_tokens": 40, "messages": [USER]} | fields
    return made(url).messages.create(**fields)


def plain(url):
    message(url)


def streamed(url):
    fields = {"stop_sequences": ["END"], "extra_body": {"temperature": 0, "top_k": 5}}
    list(message(url, stream=True, system=SYSTEM, **fields))


def stream_helper(url):
    with made(url).messages.stream(model=MODEL, max_tokens=40, messages=[USER]) as stream:
        stream.until_done()


def kept_parts(url):
    system = [{"type": "text", "text": SYSTEM}, {"type": "text", "text": QUESTION, **KEPT}]
    content = [{"type": "text", "text": QUESTION, **KEPT}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "Noon."}]
    metadata = {"user_id": "user-1"}
    message(url, system=system, messages=[*messages, USER], metadata=metadata)


def prefilled(url):
    message(url, messages=[USER, {"role": "assistant", "content": "High tide is at"}])


def thinking(url):
    message(url, max_tokens=1100, thinking={"type": "enabled", "budget_tokens": 1024})
    message(url, thinking={"type": "disabled"})
    list(message(url, thinking={"type": "adaptive"}, output_config={"effort": "low"}, stream=True))


def tools(url):
    messages = [USER]
    for _ in range(3):
        answer = message(
            url, messages=messages, tools=[TOOL | KEPT], tool_choice={"type": "auto"}, system=SYSTEM
        )
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "Noon."}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results or "Thanks. And tomorrow?"})


def tools_and_thinking(url):
    messages = [USER]
    for _ in range(2):
        thinking = {"type": "enabled", "budget_tokens": 1024}
        answer = message(url, max_tokens=1100, messages=messages, tools=[TOOL], thinking=thinking)
        messages.append({"role": "assistant", "content": answer.content})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block.id,
                "content": [{"type": "text", "text": "No such city.", **KEPT}],
                "is_error": True,
            }
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


def tool_choices(url):
    for choice in (
        {"type": "any"},
        {"type": "tool", "name": "tide_table"},
        {"type": "none"},
        {"type": "auto", "disable_parallel_tool_use": True},
    ):
        message(url, tools=[TOOL], tool_choice=choice)


def parse(url):
    made(url).messages.parse(model=MODEL, max_tokens=40, messages=[USER], output_format=Trip)


def image(url):
    source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    content = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    message(url, messages=[{"role": "user", "content": content}])
    use = {"type": "tool_use", "id": "toolu_1", "name": "tide_table", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content[:1]}
    messages = [USER, {"role": "assistant", "content": [use]}]
    message(url, messages=[*messages, {"role": "user", "content": [result]}], tools=[TOOL])


def built_in(url):
    message(url, tools=[{"type": "web_search_20250305", "name": "web_search", "max_uses": 1}])


CASES = [
    *(plain, streamed, stream_helper, kept_parts, prefilled, thinking, tools, tools_and_thinking),
    *(tool_choices, parse, image, built_in),
]

if __name__ == "__main__":
    run("anthropic-python", CASES, "anthropic")
