# mypy: ignore-errors
"""Pydantic AI: an agent with a tool and an answer of a class, over chats and Responses."""

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from shared import MODEL, QUESTION, SYSTEM, run


class Trip(BaseModel):
    """A trip."""

    city: str
    days: int


def agent(model, output):
    made = Agent(model, instructions=SYSTEM, output_type=output)

    @made.tool_plain
    def tide_table(city: str) -> str:
        """The tides of a city."""
        return f"Noon at {city}."

    return made


def openai(url):
    return OpenAIProvider(base_url=f"{url}/v1", api_key="unused")


async def chat(url):
    await agent(OpenAIChatModel(MODEL, provider=openai(url)), str).run(QUESTION)


async def chat_of_a_class(url):
    model = OpenAIChatModel(MODEL, provider=openai(url))
    await Agent(model, output_type=Trip).run(QUESTION)


async def responses(url):
    await agent(OpenAIResponsesModel(MODEL, provider=openai(url)), str).run(QUESTION)


if __name__ == "__main__":
    run("pydantic-ai", [chat, chat_of_a_class, responses], "pydantic-ai-slim")
