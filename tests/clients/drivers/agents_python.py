# mypy: ignore-errors
"""OpenAI's Agents SDK: an agent with a tool, over Responses and over chats."""

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from shared import MODEL, QUESTION, SYSTEM, run


@function_tool
def tide_table(city: str) -> str:
    """The tides of a city."""
    return f"Noon at {city}."


async def asked(url, kind, streamed):
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    model = kind(model=MODEL, openai_client=client)
    agent = Agent(name="clerk", instructions=SYSTEM, tools=[tide_table], model=model)
    if streamed:
        async for _ in Runner.run_streamed(agent, QUESTION).stream_events():
            pass
    else:
        await Runner.run(agent, QUESTION)


async def responses(url):
    await asked(url, OpenAIResponsesModel, False)


async def responses_streamed(url):
    await asked(url, OpenAIResponsesModel, True)


async def chat(url):
    await asked(url, OpenAIChatCompletionsModel, False)


async def chat_streamed(url):
    await asked(url, OpenAIChatCompletionsModel, True)


if __name__ == "__main__":
    cases = [responses, responses_streamed, chat, chat_streamed]
    run("openai-agents", cases)
