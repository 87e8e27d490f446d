# mypy: ignore-errors
"""LiteLLM: an OpenAI server as `openai/...` and as `hosted_vllm/...`, an Anthropic server."""

import litellm
from shared import IMAGE, MODEL, QUESTION, SYSTEM, TOOL, run

TURNS = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


def ask(url, provider="openai", **fields):
    base = url if provider == "anthropic" else f"{url}/v1"
    fields = {"model": f"{provider}/{MODEL}", "messages": TURNS, "num_retries": 0} | fields
    return litellm.completion(api_base=base, api_key="unused", **fields)


def loop(url, provider):
    turns = list(TURNS)
    for _ in range(3):
        answer = ask(url, provider, messages=turns, tools=[TOOL], max_tokens=40).choices[0].message
        turns.append(answer)
        for call in answer.tool_calls or ():
            turns.append({"role": "tool", "tool_call_id": call.id, "content": "Noon."})


def chat(url):
    ask(url, max_tokens=16, stop=["END"], user="user-1")
    list(ask(url, stream=True, stream_options={"include_usage": True}))


def chat_tools(url):
    loop(url, "openai")


def vllm(url):
    ask(url, "hosted_vllm", reasoning_effort="low", max_completion_tokens=16)
    image = {"type": "image_url", "image_url": {"url": IMAGE}}
    content = [{"type": "text", "text": QUESTION}, image]
    ask(url, "hosted_vllm", messages=[{"role": "user", "content": content}])
    loop(url, "hosted_vllm")


def text(url):
    litellm.text_completion(
        model=f"text-completion-openai/{MODEL}",
        prompt=QUESTION,
        api_base=f"{url}/v1",
        api_key="unused",
        max_tokens=4,
    )


def messages(url):
    ask(url, "anthropic")
    list(ask(url, "anthropic", stream=True, max_tokens=40))
    loop(url, "anthropic")


def responses(url):
    litellm.responses(
        model=f"openai/{MODEL}", input=QUESTION, api_base=f"{url}/v1", api_key="unused"
    )


if __name__ == "__main__":
    run("litellm", [chat, chat_tools, vllm, text, messages, responses])
