# mypy: ignore-errors
"""instructor: its modes for OpenAI and Anthropic."""

import instructor
from anthropic import Anthropic
from openai import OpenAI
from pydantic import BaseModel
from shared import MODEL, QUESTION, run


class Trip(BaseModel):
    """A trip."""

    city: str = "Oslo"
    days: int = 1


MESSAGES = [{"role": "user", "content": QUESTION}]


def chat(url, mode):
    client = OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    instructor.from_openai(client, mode=mode).chat.completions.create(
        model=MODEL, messages=MESSAGES, response_model=Trip, max_retries=0
    )


def tools(url):
    chat(url, instructor.Mode.TOOLS)


def json(url):
    try:
        chat(url, instructor.Mode.MD_JSON)
    except Exception as error:  # the scripted text is no JSON
        print(type(error).__name__)
    chat(url, instructor.Mode.JSON)


def json_schema(url):
    chat(url, instructor.Mode.JSON_SCHEMA)


def anthropic(url):
    client = Anthropic(base_url=url, api_key="unused", max_retries=0)
    instructor.from_anthropic(client, mode=instructor.Mode.ANTHROPIC_TOOLS).messages.create(
        model=MODEL, messages=MESSAGES, response_model=Trip, max_tokens=40, max_retries=0
    )


if __name__ == "__main__":
    run("instructor", [tools, json, json_schema, anthropic])
