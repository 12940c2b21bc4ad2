"""Tokens as transformers makes them, without holding up others."""

import threading
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer

from gateway.http.errors import ApiError
from gateway.openai.requests.messages import ChatMessage, TextPart
from gateway.openai.requests.schema import CompletionBody
from gateway.prompts.control_tokens import Conversation, TemplateRefused
from gateway.prompts.tokenization import PromptReader
from gateway.text.tokenizer import Tokenizer
from shared.errors import ModelUnsupported
from tests.gateway.conftest import DEMO_MODEL
from tests.gateway.tokenizers_for_tests import FAMILIES, byte_level
from tests.support.gguf_files import add_tokenizer

TEXTS = ["", " ", "Hello", "a<|eos|>b", "<|bos|>twice", "naïve 😀\n\n\t", "日本語", "\u0000"]


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [True, False])
def test_texts_are_encoded_as_transformers_does(
    tokenizer: Tokenizer, reference: Any, text: str, special: bool
) -> None:
    expected = reference(text, add_special_tokens=special).input_ids
    assert tokenizer.encode(text, special) == expected
    assert tokenizer.decode(expected) == reference.decode(expected, skip_special_tokens=True)


def test_conversations_are_rendered_as_transformers_does(
    tokenizer: Tokenizer, reference: Any
) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.render_chat(Conversation(messages))
    expected = reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True
    ).input_ids
    assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_a_folder_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=str(tmp_path)):
        Tokenizer.load(str(tmp_path), trust_remote_code=False)


@pytest.mark.parametrize("text", TEXTS)
def test_a_gguf_file_has_the_same_tokenizer_and_chat_template(
    tokenizer: Tokenizer, text: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    add_tokenizer(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = Tokenizer.load(str(tmp_path / "model.gguf"), trust_remote_code=False)
    assert found.encode(text) == tokenizer.encode(text)
    assert found.size == tokenizer.size
    chat = Conversation([{"role": "user", "content": text}])
    expected = tokenizer.encode_chat(tokenizer.render_with_control_tokens(chat))
    assert found.encode_chat(found.render_with_control_tokens(chat)) == expected


def test_truncation_that_came_with_the_tokenizer_is_off() -> None:
    source = byte_level()
    source.backend_tokenizer.enable_truncation(2)
    assert len(Tokenizer(source).encode("abcdef" * 5)) > 2


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_token_has_bytes(family: str) -> None:
    tokenizer = Tokenizer(FAMILIES[family]())
    assert all(isinstance(tokenizer.token_bytes(token), bytes) for token in range(tokenizer.size))


@pytest.mark.parametrize("text", ["Hello world!", "<s>a b</s> Hello", "a😀b 😀 ü", "日本 é€", ""])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_offsets_are_where_tokens_stand_in_their_text(family: str, text: str) -> None:
    tokenizer = Tokenizer(FAMILIES[family]())
    offsets = tokenizer.offsets(text)
    assert offsets is not None
    tokens = tokenizer.encode(text)
    assert len(offsets) == len(tokens)
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        name = tokenizer.token_bytes(token)
        if token != tokenizer.encode("<unk>")[0] and name.isascii():
            assert text[offset:].lstrip().startswith(name.decode().lstrip()), (token, offset)


async def test_a_chat_with_a_model_without_a_template_is_refused() -> None:
    prompts = PromptReader(Tokenizer(byte_level()), max_prompts=1)
    with pytest.raises(ApiError, match="chat template"):
        await prompts.chat([ChatMessage(role="user", content="Hi")])


async def test_what_a_template_refuses_is_the_clients_fault() -> None:
    source = byte_level()
    source.chat_template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = Tokenizer(source)
    with pytest.raises(TemplateRefused, match="alternate"):
        tokenizer.render_chat(Conversation([{"role": "user", "content": "Hi"}]))
    with pytest.raises(ApiError, match="alternate") as caught:
        await PromptReader(tokenizer, 1).chat([ChatMessage(role="user", content="Hi")])
    assert caught.value.status == 400


async def test_a_template_that_uses_names_gets_them() -> None:
    source = byte_level()
    source.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.name }}:{{ m.content }}{% endfor %}"
    )
    tokenizer = Tokenizer(source)
    message = ChatMessage(role="developer", content="be brief", name="Ann")
    prompt = await PromptReader(tokenizer, 1).chat([message])
    assert tokenizer.decode(prompt.tokens) == "system:Ann:be brief"


async def test_a_prompt_that_stays_empty_is_kept_empty_for_the_check() -> None:
    source = byte_level()
    source.bos_token = None
    prompts = PromptReader(Tokenizer(source), 1)
    [prompt] = await prompts.completion(CompletionBody(model="m", prompt=""))
    assert prompt.tokens == []


class _Watched(Tokenizer):
    """Notes on which threads it works."""

    def __init__(self, source: Any) -> None:
        self.threads: set[threading.Thread] = set()
        self.rendering: set[threading.Thread] = set()
        super().__init__(source)
        self.threads.clear()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.add(threading.current_thread())
        return super().encode(text, add_special_tokens)

    def render_chat(self, chat: Conversation) -> str:
        self.rendering.add(threading.current_thread())
        return super().render_chat(chat)


async def test_a_huge_prompt_is_tokenized_beside_the_loop() -> None:
    tokenizer = _Watched(byte_level())
    prompts = PromptReader(tokenizer, max_prompts=1)
    assert len(await prompts.text_tokens("one two three " * 10_000, True)) > 25_000
    assert tokenizer.threads
    assert threading.current_thread() not in tokenizer.threads
    prompts.close()


@pytest.mark.parametrize(
    ("messages", "elsewhere"),
    [
        ([ChatMessage(role="user", content="Hi")], False),
        ([ChatMessage(role="user", content="")] * 1_000, True),
        ([ChatMessage(role="user", content=[TextPart(type="text", text="")] * 1_000)], False),
        ([ChatMessage(role="user", content="Hi" * 10_000)], True),
    ],
)
async def test_chats_are_rendered_on_a_thread_and_long_ones_encoded_on_one(
    messages: list[ChatMessage], elsewhere: bool
) -> None:
    source = byte_level()
    source.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    tokenizer = _Watched(source)
    prompts = PromptReader(tokenizer, max_prompts=1)
    await prompts.chat(messages)
    assert threading.current_thread() not in tokenizer.rendering
    [thread] = tokenizer.threads
    assert (thread is not threading.current_thread()) == elsewhere
    prompts.close()


async def test_many_short_prompts_are_encoded_on_threads() -> None:
    tokenizer = _Watched(byte_level())
    prompts = PromptReader(tokenizer, max_prompts=100)
    assert len(await prompts.completion(CompletionBody(model="m", prompt=["a"] * 100))) == 100
    assert threading.current_thread() not in tokenizer.threads
    prompts.close()
