# mypy: ignore-errors
"""openai-python: chats, completions and Responses."""

import base64
from typing import Literal

import openai
from openai import OpenAI
from pydantic import BaseModel
from shared import CITY, IMAGE, MODEL, QUESTION, SYSTEM, TOOL, run


class Trip(BaseModel):
    city: Literal["Oslo", "Rome"]
    days: int
    stops: list[str]


USER = {"role": "user", "content": QUESTION}
FUNCTION = {"type": "function", "name": "tide_table", "parameters": CITY, "strict": True}


def made(url):
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def chat(url, **fields):
    return made(url).chat.completions.create(**{"model": MODEL, "messages": [USER]} | fields)


def plain(url):
    chat(url)


def not_streamed_in_words(url):
    chat(url, stream=False, max_tokens=16, stop=None)


def streamed(url):
    list(chat(url, stream=True, stream_options={"include_usage": True}, max_tokens=16))


def stream_helper(url):
    with made(url).chat.completions.stream(model=MODEL, messages=[USER]) as stream:
        stream.until_done()


def developer_and_named(url):
    messages = [{"role": "developer", "content": SYSTEM}, USER | {"name": "ada"}]
    chat(url, messages=messages, max_completion_tokens=16, reasoning_effort="low", verbosity="low")


def many_fields(url):
    fields = {"user": "user-1", "metadata": {"trace": "1"}, "store": True, "seed": 7}
    fields |= {"stop": ["\n\n", "END"], "service_tier": "auto", "safety_identifier": "s"}
    fields |= {"prompt_cache_key": "k", "presence_penalty": 0.1, "frequency_penalty": 0.2}
    fields |= {"temperature": 0, "top_p": 1, "logit_bias": {"9": -100}, "max_tokens": 16}
    chat(url, **fields)


def logprobs(url):
    chat(url, logprobs=True, top_logprobs=2, max_tokens=4)


def choices(url):
    chat(url, n=2, temperature=0.5, seed=1, max_tokens=4)


def one_choice(url):
    chat(url, n=1, stop="END", max_tokens=4)


def parts(url):
    content = [{"type": "text", "text": SYSTEM}, {"type": "text", "text": QUESTION}]
    chat(url, messages=[{"role": "system", "content": content[:1]}, USER | {"content": content}])


def image(url):
    content = [{"type": "text", "text": QUESTION}]
    content.append({"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}})
    chat(url, messages=[{"role": "user", "content": content}], max_tokens=4)


def audio(url):
    sound = {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}
    content = [{"type": "text", "text": QUESTION}, {"type": "input_audio", "input_audio": sound}]
    chat(url, messages=[{"role": "user", "content": content}], max_tokens=4)


def json_object(url):
    chat(url, response_format={"type": "json_object"}, max_tokens=40)


def parse(url):
    made(url).chat.completions.parse(model=MODEL, messages=[USER], response_format=Trip)


def vllm_extras(url):
    extra = {"top_k": 5, "min_p": 0.0, "chat_template_kwargs": {"enable_thinking": False}}
    chat(url, max_tokens=4, extra_body=extra)


def tools(url):
    """A loop of calls: the assistant's message goes back as the library's object has it."""
    messages = [{"role": "system", "content": SYSTEM}, USER]
    for _ in range(3):
        answer = chat(url, messages=messages, tools=[TOOL], tool_choice="auto").choices[0].message
        messages.append(answer.to_dict())
        for call in answer.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "Noon."})


def tools_written_by_hand(url):
    function = {"name": "tide_table", "arguments": '{"city": "Oslo"}'}
    calls = [{"id": f"call_{at}", "type": "function", "function": function} for at in range(2)]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "Noon."}]}
        for call in calls
    ]
    said = {"role": "assistant", "content": None, "tool_calls": calls}
    messages = [USER, said, *results, {"role": "assistant", "content": "Noon.", "refusal": None}]
    tool = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    fields = {"tools": [tool], "parallel_tool_calls": False, "tool_choice": "none"}
    chat(url, messages=[*messages, USER], **fields)


def tool_required(url):
    choice = {"type": "function", "function": {"name": "tide_table"}}
    chat(url, tools=[TOOL], tool_choice="required", max_tokens=40)
    list(chat(url, tools=[TOOL], tool_choice=choice, stream=True, max_tokens=40))


def old_functions(url):
    chat(url, functions=[TOOL["function"]], function_call="auto")


def continued(url):
    said = {"role": "assistant", "content": "High tide is at"}
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    chat(url, messages=[USER, said], extra_body=extra, max_tokens=4)


def completions(url):
    made(url).completions.create(model=MODEL, prompt=QUESTION)
    create = made(url).completions.create
    fields = {"model": MODEL, "prompt": QUESTION, "max_tokens": 4}
    list(create(**fields, stream=True, stop=["END"], logprobs=1, seed=1, temperature=0))
    create(**fields, n=2, best_of=2, temperature=0.5, seed=1)
    create(**fields, echo=True)
    create(**fields, suffix=".", user="user-1")
    create(**fields | {"prompt": [QUESTION, SYSTEM]})
    create(**fields | {"prompt": list(range(300, 364))})


def response(url, **fields):
    return made(url).responses.create(**{"model": MODEL, "input": QUESTION} | fields)


def responses(url):
    response(url)
    list(response(url, stream=True, instructions=SYSTEM, max_output_tokens=16))
    response(url, stream=False, store=False, user="user-1", metadata={"trace": "1"}, top_p=1)


def responses_items(url):
    part = {"type": "input_text", "text": QUESTION}
    said = {"type": "output_text", "text": "Noon.", "annotations": []}
    items = [
        {"role": "developer", "content": SYSTEM},
        {"role": "user", "content": [part]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [said],
        },
        {"type": "message", "role": "user", "content": [part, part]},
    ]
    response(url, input=items, truncation="auto", temperature=0, max_output_tokens=16)


def responses_tools(url):
    items = [USER]
    for _ in range(3):
        answer = response(url, input=items, tools=[FUNCTION], parallel_tool_calls=True)
        items += answer.output
        for item in answer.output:
            if item.type == "function_call":
                result = {"type": "function_call_output", "call_id": item.call_id}
                items.append({**result, "output": "Noon."})


def responses_tool_required(url):
    response(url, tools=[FUNCTION], tool_choice="required", max_output_tokens=40)
    choice = {"type": "function", "name": "tide_table"}
    list(response(url, tools=[FUNCTION], tool_choice=choice, stream=True, max_output_tokens=40))


def responses_reasoning(url):
    reasoning = {"effort": "low", "summary": "auto"}
    response(url, reasoning=reasoning, include=["reasoning.encrypted_content"], store=False)


def responses_logprobs(url):
    include = ["message.output_text.logprobs"]
    response(url, include=include, top_logprobs=2, max_output_tokens=4)


def responses_parse(url):
    made(url).responses.parse(model=MODEL, input=QUESTION, text_format=Trip)


def responses_image(url):
    image = {"type": "input_image", "image_url": IMAGE, "detail": "auto"}
    part = {"type": "input_text", "text": QUESTION}
    response(url, input=[{"role": "user", "content": [part, image]}], max_output_tokens=4)


def responses_built_in(url):
    response(url, tools=[{"type": "web_search"}])
    response(url, tools=[{"type": "code_interpreter", "container": {"type": "auto"}}, FUNCTION])
    mcp = {"type": "mcp", "server_label": "tides", "server_url": "http://127.0.0.1:9/mcp"}
    response(url, tools=[mcp | {"require_approval": "never"}])


def responses_custom_tool(url):
    response(url, tools=[{"type": "custom", "name": "code", "description": "Runs Python."}])


def responses_background(url):
    response(url, background=True)


def responses_previous(url):
    response(url, previous_response_id="resp_1", store=True)


CASES = [
    *(plain, not_streamed_in_words, streamed, stream_helper, developer_and_named, many_fields),
    *(logprobs, choices, one_choice, parts, image, audio, json_object, parse, vllm_extras, tools),
    *(tools_written_by_hand, tool_required, old_functions, continued, completions, responses),
    *(responses_items, responses_tools, responses_tool_required, responses_reasoning),
    *(responses_logprobs, responses_parse, responses_image, responses_built_in),
    *(responses_custom_tool, responses_background, responses_previous),
]

if __name__ == "__main__":
    assert openai.__version__
    run("openai-python", CASES, "openai")
