"""The request bodies, as pydantic models with vLLM's names and types, so that schema errors are
vLLM's.

Owns what vLLM's validators refuse before a handler runs. Unknown fields are kept and ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdproxy_lab.sim.api.errors import RefusedRequest
from pdproxy_lab.sim.api.salts import check_salt

INT64 = {"ge": -(2**63), "le": 2**63 - 1}
"""The bounds of a field that vLLM keeps in 64 bits."""
TokenId = Annotated[int, Field(ge=0)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class StructuredOutputs(_Body):
    """`structured_outputs`."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class JsonSchema(_Body):
    """`response_format.json_schema`."""

    name: str
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(_Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None


class Function(_Body):
    """A tool's function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(_Body):
    """A tool."""

    type: Literal["function"] = "function"
    function: Function


class FunctionName(_Body):
    """A function by its name."""

    name: str


class NamedTool(_Body):
    """`tool_choice` by name."""

    function: FunctionName
    type: Literal["function"] = "function"


class GenerationBody(_Body):
    """What both generating routes share."""

    model: str | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    presence_penalty: float | None = None
    response_format: ResponseFormat | None = None
    seed: Annotated[int, Field(**INT64)] | None = None
    stop: str | list[str] | None = []
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**63 - 1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] = []
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(**INT64)] = 0
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    thinking_token_budget: int | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        check_salt(data)
        if data.get("stream_options") and not data.get("stream"):
            raise RefusedRequest(
                "Stream options can only be defined when `stream=True`.", "stream_options"
            )
        form = data.get("response_format")
        if (
            isinstance(form, dict)
            and form.get("type") == "json_schema"
            and form.get("json_schema") is None
        ):
            raise RefusedRequest(
                "When response_format type is 'json_schema', the 'json_schema' field must be "
                "provided.",
                "response_format",
            )
        structured = data.get("structured_outputs")
        if (
            isinstance(structured, dict)
            and sum(structured.get(key) is not None for key in ("json", "regex", "choice")) > 1
        ):
            raise RefusedRequest(
                "You can only use one kind of constraints for structured outputs ('json', "
                "'regex' or 'choice').",
                "structured_outputs",
            )
        for name in cls._counts():
            value = data.get(name)
            if value is not None and not isinstance(value, int | float):
                raise RefusedRequest(f"`{name}` must be an integer.", name, value=value)
        wanted = data.get("prompt_logprobs")
        if wanted is not None and data.get("stream") and (wanted > 0 or wanted == -1):
            raise RefusedRequest(
                "`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs"
            )
        for name in cls._counts():
            value = data.get(name)
            if value is not None and value < 0 and value != -1:
                raise RefusedRequest(f"`{name}` must be a positive value or -1.", name, value=value)
        return data

    @classmethod
    def _counts(cls) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def children(self) -> int:
        """The number of choices per prompt."""
        found: int | None = getattr(self, "n", None)
        return 1 if found is None else found

    def usage_in_stream(self, *, forced: bool) -> tuple[bool, bool]:
        """Return whether a stream ends with the usage, and whether each of its events has one.

        `forced`: the engine runs with `--enable-force-include-usage`.
        """
        options = self.stream_options
        at_the_end = options is not None and bool(options.include_usage)
        return forced or at_the_end, forced or (
            at_the_end and options is not None and bool(options.continuous_usage_stats)
        )


class CompletionBody(GenerationBody):
    """The body of `/v1/completions`."""

    prompt: list[TokenId] | list[list[TokenId]] | str | list[str] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    max_tokens: int | None = 16
    n: int = 1
    suffix: str | None = None
    add_special_tokens: bool = True

    @classmethod
    def _counts(cls) -> tuple[str, ...]:
        return ("prompt_logprobs", "logprobs")

    @model_validator(mode="before")
    @classmethod
    def _check_prompt(cls, data: Any) -> Any:
        if isinstance(data, dict):
            if data.get("max_tokens") is None:
                data = {**data, "max_tokens": 16}
            if data.get("prompt") in (None, "") and not data.get("prompt_embeds"):
                raise RefusedRequest(
                    "Either prompt or prompt_embeds must be provided and non-empty.", "prompt"
                )
        return data


class ChatBody(GenerationBody):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = 1
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = "none"
    include_reasoning: bool = True
    parallel_tool_calls: bool | None = True
    echo: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_text: bool | None = None

    @classmethod
    def _counts(cls) -> tuple[str, ...]:
        return ("prompt_logprobs", "top_logprobs")

    @model_validator(mode="before")
    @classmethod
    def _check_chat(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        top = data.get("top_logprobs")
        if isinstance(top, int) and (top == -1 or top > 0) and not data.get("logprobs"):
            raise RefusedRequest(
                "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs"
            )
        if data.get("tools") == []:
            raise RefusedRequest(
                "`tools` must not be an empty array. Either provide at least one tool or omit "
                "the field entirely.",
                "tools",
            )
        if "tool_choice" not in data and data.get("tools"):
            data = {**data, "tool_choice": "auto"}
        choice = data.get("tool_choice")
        if choice is not None and choice != "none":
            _check_choice(choice, data.get("tools"))
        if data.get("continue_final_message") and data.get("add_generation_prompt"):
            raise RefusedRequest(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
            )
        return data


def _check_choice(choice: Any, tools: Any) -> None:
    if tools is None:
        raise RefusedRequest("When using `tool_choice`, `tools` must be set.", "tool_choice")
    usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    if choice in ("auto", "required"):
        return
    if not isinstance(choice, dict):
        raise RefusedRequest(
            f'Invalid value for `tool_choice`: {choice}! Only named tools, "none", "auto" or '
            f'"required" are supported.',
            "tool_choice",
        )
    function = choice.get("function")
    if not isinstance(function, dict):
        raise RefusedRequest(
            f"Invalid value for `function`: `{function}` in `tool_choice`! {usage}",
            "tool_choice.function",
        )
    if "name" not in function:
        raise RefusedRequest(
            f"Expected field `name` in `function` in `tool_choice`! {usage}",
            "tool_choice.function.name",
        )
    names = [tool.get("function", {}).get("name") for tool in tools if isinstance(tool, dict)]
    if function["name"] not in names:
        raise RefusedRequest(
            "The tool specified in `tool_choice` does not match any of the specified `tools`",
            "tool_choice",
        )


class TokenizeBody(_Body):
    """The body of `/tokenize`: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeBody(_Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[TokenId]
