"""How long a text may be is known before it is tokenized."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gateway.http.errors import ApiError
from gateway.openai.requests.messages import ChatMessage, TextPart
from gateway.openai.requests.schema import CompletionBody
from gateway.prompts.tokenization import PromptReader, TokenizeOptions
from gateway.text.text_limits import text_bound
from gateway.text.tokenizer import Tokenizer
from tests.gateway.tokenizers_for_tests import FAMILIES, byte_level, metaspace


class Watched(Tokenizer):
    """Counts what it encodes."""

    num_encoded = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_encoded += 1
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize("family", ["byte level", "sentencepiece"])
@settings(deadline=None)
@given(text=st.text(st.sampled_from("aHelo wrd!é日本😀\x04\U00040000 <s>"), max_size=60))
def test_a_text_has_at_least_as_many_tokens_as_its_bound(family: str, text: str) -> None:
    tokenizer = Tokenizer(FAMILIES[family]())
    assert tokenizer.text_bound is not None
    assert tokenizer.text_bound.min_tokens(text) <= len(tokenizer.encode(text, False))


def test_characters_without_a_token_do_not_count() -> None:
    source = byte_level()
    vocab = json.loads(source.backend_tokenizer.to_str())["model"]["vocab"]
    del vocab[chr(256 + 4)]  # the byte 4
    kept = {name: number for number, name in enumerate(vocab)}
    backend = Backend(models.BPE(kept, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    bound = text_bound(backend)
    assert bound is not None
    assert bound.dropped == "\x04"
    assert backend.encode("\x04" * 1_000).ids == []
    assert bound.min_tokens("\x04" * 1_000) == 0


def test_where_text_may_vanish_there_is_no_bound() -> None:
    assert text_bound(None) is None
    assert Tokenizer(metaspace()).text_bound is None  # an unknown run is one token
    for change in (
        lambda b: setattr(b, "normalizer", normalizers.Strip()),
        lambda b: setattr(b, "normalizer", normalizers.Replace("  ", " ")),
        lambda b: setattr(b, "pre_tokenizer", pre_tokenizers.Whitespace()),
        lambda b: b.add_tokens([AddedToken("<mask>", lstrip=True)]),
    ):
        backend = byte_level().backend_tokenizer
        change(backend)
        assert text_bound(backend) is None
    backend = byte_level().backend_tokenizer
    backend.normalizer = normalizers.NFC()
    composed, plain = text_bound(backend), text_bound(byte_level().backend_tokenizer)
    assert composed is not None
    assert plain is not None
    assert composed.chars_per_token == 4 * plain.chars_per_token


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    source = byte_level()
    source.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = Watched(source)
    prompts = PromptReader(tokenizer, max_prompts=2)
    assert tokenizer.text_bound is not None
    longest = 100 * tokenizer.text_bound.chars_per_token
    options = TokenizeOptions("a", max_tokens=100)
    too_long = "a" * (longest + tokenizer.text_bound.chars_per_token)
    for body in (CompletionBody(model="m", prompt=p) for p in (too_long, ["a", too_long])):
        with pytest.raises(ApiError, match=r"at least 101 tokens") as caught:
            await prompts.completion(body, options)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param.startswith("prompt")  # type: ignore[union-attr]
    tokenizer.num_encoded = 0
    with pytest.raises(ApiError, match="at least 101 tokens"):
        await prompts.completion(CompletionBody(model="m", prompt=too_long), options)
    assert tokenizer.num_encoded == 0
    with pytest.raises(ApiError, match="messages has"):
        await prompts.chat([ChatMessage(role="user", content=too_long)], options=options)
    await prompts.completion(CompletionBody(model="m", prompt="a" * longest), options)
    prompts.close()


async def test_the_text_of_one_call_is_bounded_whatever_the_model() -> None:
    source = byte_level()
    source.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    prompts = PromptReader(Tokenizer(source), max_prompts=3, max_chars=10)
    await prompts.completion(CompletionBody(model="m", prompt=["a" * 5, "a" * 5]))
    for body in (CompletionBody(model="m", prompt=p) for p in ("a" * 11, ["a" * 5, "a" * 6])):
        with pytest.raises(ApiError, match="11 characters; at most 10"):
            await prompts.completion(body)
    parts = [TextPart(type="text", text="a" * 6), TextPart(type="text", text="a" * 5)]
    await prompts.chat([ChatMessage(role="user", content=parts[:1])])
    with pytest.raises(ApiError, match="11 characters; at most 10"):
        await prompts.chat([ChatMessage(role="user", content=parts)])
    with pytest.raises(ApiError, match="11 characters; at most 10"):
        await prompts.text_tokens("a" * 11, True)
    prompts.close()
