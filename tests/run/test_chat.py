"""Rendered conversations against transformers' `apply_chat_template`, on templates of the kinds that models ship."""

from datetime import datetime
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from anechain.errors import BundleError, RequestError
from anechain.run.chat import ChatTemplate
from anechain.run.detokenizer import Vocabulary
from anechain.run.tokenizer import Tokenizer

SMOLLM2 = """\
{%- for message in messages -%}
{%- if loop.first and messages[0]['role'] != 'system' -%}
{{ '<|im_start|>system\\nYou are a small, friendly model.<|im_end|>\\n' }}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# Namespaces, a backwards search, tools as JSON, and an empty thought when thinking is switched off.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# The first token is written by the template; the date is today's; blocks stand on lines of their own.
LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") if strftime_now is defined else "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{% for message in messages %}
  {% if message['role'] == 'assistant' %}
    {% generation %}
    {%- set text = message['content'] | trim %}
    {{- text + eos_token }}
    {% endgeneration %}
  {% else %}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>' }}

{{ message['content'] | trim }}<|eot_id|>
  {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if loop.index > 8 %}{% break %}{% endif %}
{%- if message['role'] == 'note' %}{% continue %}{% endif %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' }}
{%- if message['content'] is string %}{{ message['content'] | trim }}{% else %}
{%- for item in message['content'] %}{{ item['text'] | trim if item['type'] == 'text' }}{% endfor %}{% endif %}
{{ '<end_of_turn>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

TOJSON = """\
{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ messages[0] | tojson(ensure_ascii=True, sort_keys=True) }}|
{{ messages[0] | tojson(separators=(',', ':')) }}|{{ tools is none }}|{{ documents is none }}|{{ nothing is defined }}|
{% generation %}{% set inside = 1 %}{% endgeneration %}{{ inside is defined }}|{{ dict(a=1) | tojson }}
"""

TEMPLATES = {"smollm2": SMOLLM2, "qwen3": QWEN3, "llama3": LLAMA3, "gemma": GEMMA, "tojson": TOJSON}
USER = {"role": "user", "content": "  What is <b>2 + 2</b>? 'née' 日本 😀\n"}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFour. "}
SYSTEM = {"role": "system", "content": "Be brief.\n"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "<é>"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds <two> numbers & more", "parameters": {}}}
CONVERSATIONS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [USER, ASSISTANT, USER],
    "ends with the assistant": [SYSTEM, USER, ASSISTANT],
    "parts": [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]}],
    "tool call": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "name": None},
    ],
    "skipped": [USER, ASSISTANT, {"role": "note", "content": "not shown by one template"}, ASSISTANT],
    "long": [USER, ASSISTANT] * 6,
}
VARIABLES = {
    "none": {},
    "thinking": {"enable_thinking": True},
    "no thinking": {"enable_thinking": False},
    "tools": {"tools": [TOOL, TOOL]},
    "own bos": {"bos_token": "<other>", "date_string": "1 Jan 2000"},
}


@pytest.fixture(scope="module")
def library() -> Library:
    library = Library(models.BPE({char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    tokens = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>")
    library.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    library.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])
    return library


def tokenizer_with(library: Library, templates: dict[str, str]) -> Tokenizer:
    special = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    return Tokenizer(library, Vocabulary(library, "here"), frozenset({257}), 256, special, templates)


def theirs(library: Library, template: object, *arguments: object, **options: object) -> object:
    from transformers import PreTrainedTokenizerFast

    twin = PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<|bos|>", eos_token="<|eos|>")
    twin.chat_template = template
    return twin.apply_chat_template(*arguments, **options)


def joined(message: dict) -> dict:
    parts = message.get("content")
    return {**message, "content": "".join(p["text"] for p in parts)} if isinstance(parts, list) else message


@pytest.mark.parametrize("variables", VARIABLES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_ids_equal_transformers(name: str, variables: str, library: Library) -> None:
    tokenizer = tokenizer_with(library, {"default": TEMPLATES[name]})
    compared = refused = 0
    for messages in CONVERSATIONS.values():
        for prompt in (True, False):
            options = {"add_generation_prompt": prompt, **VARIABLES[variables]}
            try:
                expected = theirs(library, TEMPLATES[name], messages, tokenize=False, **options)
            except Exception as error:
                if isinstance(error, TypeError) and any(isinstance(m.get("content"), list) for m in messages):
                    plain = [joined(message) for message in messages]  # ours reads parts where theirs cannot
                    expected = theirs(library, TEMPLATES[name], plain, tokenize=False, **options)
                    assert ChatTemplate(tokenizer).render(messages, prompt, VARIABLES[variables]) == expected
                    compared += 1
                    continue
                with pytest.raises(RequestError, match="the model's chat template refuses this conversation"):
                    ChatTemplate(tokenizer).render(messages, prompt, VARIABLES[variables])
                refused += 1
                continue
            assert ChatTemplate(tokenizer).render(messages, prompt, VARIABLES[variables]) == expected
            ids = theirs(library, TEMPLATES[name], messages, tokenize=True, return_dict=False, **options)
            assert ChatTemplate(tokenizer).encode(messages, prompt, VARIABLES[variables]) == ids
            compared += 1
    assert compared >= 6 and compared + refused == 2 * len(CONVERSATIONS)


def test_the_first_token_is_not_added_twice(library: Library) -> None:
    template = ChatTemplate(tokenizer_with(library, {"default": LLAMA3}))
    ids = template.encode([USER])
    assert ids[0] == 256 and ids.count(256) == 1
    assert datetime.now().strftime("%d %b %Y") in template.render([USER])


def test_named_templates(library: Library) -> None:
    named = {"default": "plain", "tool_use": "with {{ tools | length }}"}
    template = ChatTemplate(tokenizer_with(library, named))
    for variables, expected in (({}, "plain"), ({"tools": [TOOL]}, "with 1"), ({"tools": None}, "plain")):
        assert template.render([USER], variables=variables) == expected
        assert theirs(library, named, [USER], tokenize=False, **variables) == expected
    with pytest.raises(RequestError, match="this model's chat templates are rag, tool_use, and none is called default"):
        ChatTemplate(tokenizer_with(library, {"rag": "", "tool_use": ""})).render([USER])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "the conversation is empty: give at least one message."),
        (
            [USER, "hello", {"content": "x"}, {"role": 3}],
            "message 2, 3, 4 of the conversation has no role: give each one",
        ),
        ([{"role": "user", "content": Path("x")}], "the conversation is not plain JSON data (Object of type PosixPath"),
        ([SYSTEM, USER], "refuses this conversation (System role not supported): change its messages."),
        ([USER, USER], "(Conversation roles must alternate user/assistant/user/assistant/...)"),
        ([{"role": "user", "content": 3}], "refuses this conversation ("),
    ],
)
def test_conversations_that_are_refused(messages: list, said: str, library: Library) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(tokenizer_with(library, {"default": GEMMA})).render(messages)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages[0].update(a=1) }}",
        "{{ 'x' | attr('__class__') }}!{{ ('x' | attr('__class__')).__name__ }}",
    ],
)
def test_the_sandbox_holds(attack: str, library: Library) -> None:
    with pytest.raises(RequestError, match="refuses this conversation"):
        ChatTemplate(tokenizer_with(library, {"default": attack})).render([USER])


def test_a_model_without_a_template_says_so(library: Library) -> None:
    with pytest.raises(
        RequestError, match="this model has no chat template: give it a plain prompt with `anechain run`"
    ):
        ChatTemplate(tokenizer_with(library, {}))


def test_templates_that_are_not_jinja_are_all_named(library: Library) -> None:
    with pytest.raises(BundleError) as caught:
        ChatTemplate(tokenizer_with(library, {"default": "\n{% if %}", "fine": "x", "tool_use": "{% for %}"}))
    assert "is not valid Jinja ('default', line 2: " in str(caught.value) and "'tool_use', line 1" in str(caught.value)


def test_content_in_parts_is_their_texts_for_a_template_that_adds_strings(library: Library) -> None:
    template = "{% for m in messages %}{{ '<' + m['content'] + '>' }}{% endfor %}"
    chat = ChatTemplate(tokenizer_with(library, {"default": template}))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat.render([{"role": "user", "content": parts}]) == "<ab>"
    assert chat.encode([{"role": "user", "content": parts}]) == chat.encode([{"role": "user", "content": "ab"}])
    assert chat.render([{"role": "user", "content": []}]) == "<>"
    with pytest.raises(RequestError) as error:
        chat.render([{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": "x"}}, 3]}])
    assert str(error.value) == "a message has content of type image_url, int: this model reads text alone."
