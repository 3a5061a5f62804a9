"""A request body becomes a Plan: everything that can be refused is refused here, before the chain is touched."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar, TypeVarTuple

from anechain.errors import AnechainError
from anechain.run.chat import THINK, ChatTemplate, as_text, opens_thinking
from anechain.run.grammar import Constraint, Grammar, Grammars
from anechain.run.sample import Sampler, Sampling
from anechain.run.tokenizer import Tokenizer
from anechain.run.tool_calls import call_schema, free_or_call
from anechain.serve.answer import Plan
from anechain.serve.problem import Problem, problem_of
from anechain.serve.schema import MAX_PROMPTS, ChatRequest, CompletionRequest, NamedTool

Tools = Literal["none", "free", "call"]
Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
OWN_VARIABLES = ("messages", "tools", "add_generation_prompt")  # of a template; they are not for chat_template_kwargs


class Planner:
    """Plans for one bundle. Used by several threads."""

    def __init__(self, tokenizer: Tokenizer, context: int) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._template = ChatTemplate(tokenizer) if tokenizer.chat_templates else None
        texts = "".join(tokenizer.chat_templates.values())
        self._thinks, self._takes_tools = THINK in texts, "tools" in texts
        self._lock = threading.Lock()
        self._grammars: Grammars | None = None

    def chat(self, request: ChatRequest) -> Plan:
        """Raises Problem."""
        if self._template is None:
            raise Problem(
                400, "this model has no chat template: use /v1/completions.", param="messages", code="no_chat_template"
            )
        tools: Tools = "none"
        grammar, variables = None, dict(request.chat_template_kwargs)
        if taken := [name for name in OWN_VARIABLES if name in variables]:
            raise Problem(
                400,
                f"chat_template_kwargs sets {', '.join(taken)}, which the request itself decides.",
                param="chat_template_kwargs",
            )
        if request.tools and request.tool_choice != "none":
            if not self._takes_tools:
                raise Problem(400, "this model's chat template takes no tools.", param="tools")
            variables["tools"] = [tool.model_dump(exclude_unset=True) for tool in request.tools]
            grammar, tools = self._tool_grammar(request)
        if request.response_format and (schema := request.response_format.schema) is not None:
            grammar = _named("response_format", Grammar.schema, schema)
        # Parts are joined for every template: one that knows nothing of them would print the list itself.
        messages = [_named("messages", as_text, message.model_dump(exclude_none=True)) for message in request.messages]
        rendered = _named("messages", self._template.render, messages, True, variables)
        ids = _named("messages", self._tokenizer.encode, rendered, False)
        self._check_length(ids, "messages")
        inside = opens_thinking(rendered)
        start: Callable[[], Constraint] | None = None
        if grammar is not None:
            self._started(grammar, inside, "tools" if tools != "none" else "response_format")
            start = partial(self._started, grammar, inside, "response_format")

        return Plan(
            prompts=(tuple(ids),),
            n=request.n,
            sampling=self._sampling(request),
            limit=request.limit,
            stops=tuple(request.stops),
            constraint=start,
            rank=(request.top_logprobs or 0) if request.logprobs else None,
            thinking=(inside, self._thinks),
            tools=tools,
        )

    def completion(self, request: CompletionRequest) -> Plan:
        """Raises Problem."""
        given = request.prompts
        if not given or len(given) > MAX_PROMPTS:
            raise Problem(400, f"prompt holds {len(given)} prompts: give 1 to {MAX_PROMPTS}.", param="prompt")
        prompts = [self._ids(prompt) for prompt in given]
        for ids in prompts:
            self._check_length(ids, "prompt")
        echo = None
        if request.echo:
            echo = tuple(p if isinstance(p, str) else self._tokenizer.decode(p) for p in given)
        return Plan(
            prompts=tuple(tuple(ids) for ids in prompts),
            n=request.n,
            sampling=self._sampling(request),
            limit=request.max_tokens,
            stops=tuple(request.stops),
            rank=request.logprobs,
            echo=echo,
            ends_ranked=True,
        )

    def _tool_grammar(self, request: ChatRequest) -> tuple[Grammar, Tools]:
        chosen = request.tool_choice.function.name if isinstance(request.tool_choice, NamedTool) else None
        functions = {t.function.name: t.function.parameters for t in request.tools if chosen in (None, t.function.name)}
        if chosen is None and request.tool_choice == "auto":
            return _named("tools", free_or_call, functions, self._tokenizer, request.parallel_tool_calls), "free"
        return Grammar.schema(_named("tools", call_schema, functions)), "call"

    def _started(self, grammar: Grammar, after_thinking: bool, field: str) -> Constraint:
        with self._lock:
            if self._grammars is None:
                self._grammars = Grammars(self._tokenizer)
            return _named(field, self._grammars.start, grammar, after_thinking)

    def _sampling(self, request: ChatRequest | CompletionRequest) -> Sampling:
        seed = None if request.seed is None else request.seed % 2**64
        bias = {int(key): value for key, value in request.logit_bias.items()}
        sampling = Sampling(request.temperature, request.top_k, request.top_p, seed, bias)
        _named("logit_bias", Sampler, sampling, self._tokenizer.n_ids)
        return sampling

    def _ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Exactly one first token where the tokenizer adds one, also when the text spells it out."""
        if isinstance(prompt, str):
            ids = _named("prompt", self._tokenizer.encode, prompt)
            bos = self._tokenizer.bos_id
            return ids[1:] if bos is not None and ids[:2] == [bos, bos] else ids
        unknown = [i for i in prompt if not self._tokenizer.vocabulary.has(i)]
        if unknown:
            raise Problem(400, f"prompt holds token ids that this model does not have: {unknown[:5]}.", param="prompt")
        return list(prompt)

    def _check_length(self, ids: Sequence[int], field: str) -> None:
        if not ids:
            raise Problem(400, f"{field} has no tokens: give some text.", param=field)
        if len(ids) >= self._context:
            raise Problem(
                400,
                f"this model's context is {self._context} tokens, answer included, and {field} has {len(ids)}: "
                "shorten it.",
                param=field,
                code="context_length_exceeded",
            )


def _named(field: str, function: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """What `function` returns; what it refuses, with the field at fault."""
    try:
        return function(*arguments)
    except AnechainError as error:
        raise problem_of(error, field) from None
