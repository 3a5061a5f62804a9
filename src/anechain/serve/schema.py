"""What the two generating routes take: the fields of the OpenAI API that do something here, and no others.

A null counts as absent. An unknown or unsupported field, or a value that asks for something that is not done, is a 400
that names the field; nothing is accepted and ignored. `user` and `metadata` are labels without an effect by contract.
"""

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from anechain.serve.problem import Problem

MAX_STOPS, MAX_CHOICES, MAX_PROMPTS = 4, 8, 64
Model = TypeVar("Model", bound=BaseModel)
Count = Annotated[int, Field(ge=1)]


def _zero(value: float) -> float:
    if value:
        raise PydanticCustomError("not_done", "only 0 is supported")
    return value


Zero = Annotated[float, AfterValidator(_zero)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class StreamOptions(_Strict):
    include_usage: bool = False


class JsonSchema(_Strict):
    """OpenAI's nesting: the schema lies beside its name. `strict` changes nothing: it is always kept to."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: str = ""
    description: str = ""
    strict: bool = True


class ResponseFormat(_Strict):
    """Also taken: the flat form, with `schema` beside `type`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def schema(self) -> dict[str, Any] | None:  # type: ignore[override]
        """The schema that an answer keeps to; None for free text. Raises Problem when there is none to keep to."""
        given = self.json_schema.schema_ if self.json_schema else self.schema_
        if self.json_schema and self.schema_ is not None:
            raise Problem(400, "response_format has two schemas: give one.", param="response_format")
        if self.type == "text":
            if given is not None:
                raise Problem(400, "response_format text has a schema: say json_schema.", param="response_format")
            return None
        if self.type == "json_schema" and given is None:
            raise Problem(400, "response_format json_schema has no schema: give one.", param="response_format")
        return {"type": "object"} if given is None else given


class Function(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = True


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(_Strict):
    name: str


class NamedTool(_Strict):
    type: Literal["function"]
    function: NamedFunction


class Message(BaseModel):
    """Handed to the chat template as it is: templates read fields of their own."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    role: str
    content: str | list[Any] | None = None


class _Common(_Strict):
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] = ""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    seed: int | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    frequency_penalty: Zero = 0.0
    presence_penalty: Zero = 0.0
    user: str = ""
    metadata: dict[str, str] = Field(default_factory=dict)
    store: Literal[False] = False
    service_tier: Literal["auto", "default"] = "auto"

    @model_validator(mode="after")
    def _whole(self) -> "_Common":
        if self.stream_options is not None and not self.stream:
            raise Problem(400, "stream_options is for streams: set stream to true.", param="stream_options")
        if len(self.stops) > MAX_STOPS:
            raise Problem(400, f"stop has {len(self.stops)} strings, and {MAX_STOPS} are the most.", param="stop")
        wrong = [key for key in self.logit_bias if not (key.isascii() and key.isdigit())]
        if wrong:
            raise Problem(400, f"logit_bias is by token id, and {wrong[0]!r} is none.", param="logit_bias")
        return self

    @property
    def stops(self) -> list[str]:
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text]

    @property
    def with_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Common):
    messages: list[Message]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fitting(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise Problem(400, "top_logprobs is for logprobs: set logprobs to true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise Problem(400, "max_tokens and max_completion_tokens differ: give one.", param="max_tokens")
        names = [tool.function.name for tool in self.tools]
        chosen = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if len(set(names)) != len(names):
            raise Problem(400, "two tools have the same name.", param="tools")
        if (chosen is not None and chosen not in names) or (self.tool_choice == "required" and not names):
            raise Problem(400, "tool_choice asks for a tool that is not among tools.", param="tool_choice")
        if names and self.tool_choice != "none" and self.response_format and self.response_format.type != "text":
            raise Problem(400, "response_format and tools exclude each other here.", param="response_format")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class CompletionRequest(_Common):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] = 16
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] = 1

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


def read(kind: type[Model], body: bytes) -> Model:
    """The request in `body`. Raises Problem that names every field at fault."""
    try:
        data = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON ({error}).") from None
    if not isinstance(data, dict):
        raise Problem(400, "the body is not a JSON object.")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _faults(error) from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _faults(error: ValidationError) -> Problem:
    """One phrase a field; of a union's branches the first."""
    phrases: dict[str, str] = {}
    for fault in error.errors(include_url=False, include_context=False, include_input=False):
        field = str(fault["loc"][0]) if fault["loc"] else "the body"
        what = "is not supported" if fault["type"] == "extra_forbidden" else fault["msg"].lower()
        where = ".".join(str(part) for part in fault["loc"])
        phrases.setdefault(field, f"{where[:200]}: {what}")
    return Problem(400, f"{'; '.join(phrases.values())}.", param=next(iter(phrases)), code="invalid_request")
