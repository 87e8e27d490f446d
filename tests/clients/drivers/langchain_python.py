# mypy: ignore-errors
"""LangChain: langchain-openai and langchain-anthropic."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from shared import IMAGE, MODEL, QUESTION, SYSTEM, run


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


@tool
def tide_table(city: str) -> str:
    """The tides of a city."""
    return f"Noon at {city}."


TURNS = [SystemMessage(SYSTEM), HumanMessage(QUESTION)]


def openai(url, **fields):
    return ChatOpenAI(base_url=f"{url}/v1", api_key="unused", model=MODEL, max_retries=0, **fields)


def anthropic(url, **fields):
    fields = {"model_name": MODEL, "max_retries": 0} | fields
    return ChatAnthropic(base_url=url, api_key="unused", **fields)


def loop(model):
    turns = list(TURNS)
    for _ in range(3):
        answer = model.invoke(turns)
        turns.append(answer)
        for call in answer.tool_calls:
            turns.append(ToolMessage(tide_table.invoke(call["args"]), tool_call_id=call["id"]))


def chat(url):
    openai(url).invoke(TURNS)
    openai(url, max_tokens=16, stop=["END"], seed=1, temperature=0).invoke(TURNS)


def chat_streamed(url):
    list(openai(url).stream(TURNS))


def chat_tools(url):
    loop(openai(url).bind_tools([tide_table]))


def chat_structured(url):
    for method in ("json_schema", "function_calling", "json_mode"):
        try:
            openai(url).with_structured_output(Trip, method=method).invoke(TURNS)
        except Exception as error:  # json_mode: an empty object is no trip
            if method != "json_mode":
                raise error from None


def chat_image(url):
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    openai(url).invoke([HumanMessage([{"type": "text", "text": QUESTION}, image])])


def completion(url):
    OpenAI(base_url=f"{url}/v1", api_key="unused", model=MODEL, max_retries=0).invoke(QUESTION)


def responses(url):
    model = openai(url, use_responses_api=True, reasoning={"effort": "low"})
    model.invoke(TURNS)
    list(model.stream(TURNS))


def responses_tools(url):
    loop(openai(url, use_responses_api=True).bind_tools([tide_table]))


def messages(url):
    anthropic(url).invoke(TURNS)
    list(anthropic(url, max_tokens=40).stream(TURNS))


def messages_tools(url):
    loop(anthropic(url, max_tokens=40).bind_tools([tide_table]))


def messages_structured(url):
    anthropic(url, max_tokens=40).with_structured_output(Trip).invoke(TURNS)


CASES = [
    *(chat, chat_streamed, chat_tools, chat_structured, chat_image, completion, responses),
    *(responses_tools, messages, messages_tools, messages_structured),
]

if __name__ == "__main__":
    run("langchain", CASES, "langchain-core")
