"""Conversations are rendered once only where all control tokens are certainly the template's."""

from typing import Any

import pytest
from transformers import AutoTokenizer

from gateway.prompts.control_tokens import ControlTokens, Conversation, RenderedChat
from gateway.prompts.template_analysis import writes_names_whole
from gateway.text.tokenizer import Tokenizer
from tests.gateway.conftest import DEMO_MODEL
from tests.gateway.prompts.test_control_tokens import MODELS, TEMPLATES, byte_level, tokenizer_of

NAMES = {"<s>", "</s>", "<tool>"}
PLAIN = [
    TEMPLATES["roles"],
    "{{ bos_token }}{% for m in messages %}{{ '<s>' + m['role'] ~ '\n' + m.content | trim }}</s>"
    "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}",
    "{% if messages[0].role == 'system' %}<s>{{ messages[0]['content'].strip() }}{% endif %}</s>",
    "{% macro turn(m) %}<s>{{ m.content }}{% endmacro %}"
    "{% for m in messages[1:] %}{{ turn(m) + eos_token }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{{ '<s>' if m.tool_calls else '</s>' }}"
    "{{ m.tool_calls | tojson(indent=2) }}{% endfor %}",
]
# Some of these let a message forge a token, the others are too much like those.
FORGEABLE = [
    "{{ '<' + messages[0].content + '>' }}",
    "<{{ messages[0].content }}>",
    "</{{ messages[0].content }}>",
    "{{ '<s>'[0] + messages[0].content }}>",
    "{{ '<s>'[:1] ~ messages[0].content }}>",
    "{% set x = '<s>' %}{{ x[0] + messages[0].content + x[2] }}",
    "{% set x = eos_token %}{{ x[0] + messages[0].content }}>",
    "{{ bos_token[0] + messages[0].content }}>",
    "{{ bos_token.replace('s', messages[0].content) }}",
    "{{ ('<s>').replace('s', messages[0].content) }}",
    "{{ ('<s>' + '')[0] + messages[0].content }}>",
    "{{ '<s>' | first + messages[0].content }}>",
    "{{ ['<s>'][0][0] + messages[0].content }}>",
    "{{ ['<s>', ''] | join(messages[0].content) }}",
    "{{ '%s%s>' % ('<s>', messages[0].content) }}",
    "{{ '%c%s>' | format(60, messages[0].content) }}",
    "{{ '&lt;' | striptags ~ messages[0].content }}>",
    "{{ '{}<s>'.format(messages[0].content) }}",
    "{% for c in '<s>' %}{{ c + messages[0].content }}{% endfor %}",
    "{% macro f() %}<s>{% endmacro %}{{ f()[0] + messages[0].content }}>",
    "{% macro f() %}<s>{% endmacro %}{{ f().rstrip('s>') + messages[0].content }}>",
    "{% macro f() %}<s>{% endmacro %}{{ f() | trim('s>') ~ messages[0].content }}>",
    "{% macro f() %}<s>{% endmacro %}{% set x = f() %}{{ x.0 + messages[0].content }}>",
    "{% macro f() %}<s>{% endmacro %}{% for c in f() %}{{ c ~ messages[0].role }}{% endfor %}",
    "{% macro f() %}<s>{% endmacro %}{% macro g(t) %}{{ t.0 }}{% endmacro %}{{ g(f()) }}s>",
    "{% set x %}<s>{% endset %}{{ x[0] + messages[0].content }}>",
    "{% filter truncate(1, true, '') %}<s>{% endfilter %}{{ messages[0].content }}>",
    "{% set m = messages %}{% set messages = '<s>' %}{{ messages[0] + m[0].content }}>",
    "{% for m in messages %}{% for messages in ['<s>'] %}{{ messages[0] + m.content }}>"
    "{% endfor %}{% endfor %}",
    "{% macro f(messages) %}{{ messages[0] }}{% endmacro %}{{ f(bos_token) }}s>",
    "{{ messages[0].content ",
]


@pytest.mark.parametrize("source", PLAIN)
def test_templates_that_put_names_around_messages_write_them_whole(source: str) -> None:
    assert writes_names_whole(source, NAMES)


@pytest.mark.parametrize("source", FORGEABLE)
def test_templates_that_take_names_to_pieces_are_not_trusted(source: str) -> None:
    assert not writes_names_whole(source, NAMES)


@pytest.mark.parametrize("names", [{"<s>", "[INST]"}, {"<s>", "<s>>"}, {"<s>", "<s >  "}])
def test_names_that_other_text_could_make_are_not_trusted(names: set[str]) -> None:
    assert not writes_names_whole(PLAIN[0], names)


@pytest.mark.parametrize("source", ["<{{ messages[0].name }}>", "{{ '</' + messages[0].name }}>"])
def test_no_text_becomes_a_control_token_by_what_stands_around_it(source: str) -> None:
    tokenizer = byte_level()
    tokenizer.chat_template = source
    given = Conversation([{"role": "user", "name": "s", "content": "s"}])
    rendered = Tokenizer(tokenizer).render_with_control_tokens(given)
    assert rendered.text in NAMES
    assert not rendered.control


@pytest.mark.parametrize("model", MODELS)
def test_both_ways_to_render_find_the_same_control_tokens(model: str) -> None:
    tokenizer = Tokenizer(tokenizer_of(model))
    texts = ["Be brief.", "x > y", " |im_start|> s", "", "日本 é 👍\n\n"]
    for text in texts:
        messages: list[dict[str, Any]] = [
            {"role": role, "content": text} for role in ("system", "user", "assistant", "user")
        ]
        given = Conversation(messages)
        once = tokenizer.render_with_control_tokens(given)
        names = {token.name for token in once.control or ()}
        twice = ControlTokens(names).render(tokenizer.render_chat, given)
        assert once == twice
        assert once.control


@pytest.mark.parametrize(
    ("text", "key", "times"), [("Hi", "k", 1), ("a < b", "k", 2), ("Hi", "k<", 2)]
)
def test_a_conversation_without_the_first_character_of_names_is_rendered_once(
    text: str, key: str, times: int
) -> None:
    source = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer = Tokenizer(source)
    seen: list[Conversation] = []

    def render(chat: Conversation) -> str:
        seen.append(chat)
        return tokenizer.render_chat(chat)

    names = {token.content for token in source.added_tokens_decoder.values()}
    whole = writes_names_whole(source.chat_template, names)
    given = Conversation([{"role": "user", "content": text}], [{"function": {key: [1, None]}}])
    found: RenderedChat = ControlTokens(names, (), whole).render(render, given)
    assert len(seen) == times
    assert found.control is not None
    assert [span.name for span in found.control] == ["<|bos|>", "<|user|>", "<|assistant|>"]
