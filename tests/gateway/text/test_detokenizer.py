"""Text in pieces is the text of the whole, and no piece ends inside a character."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.detokenizer import Detokenizer
from gateway.text.tokenizer import Tokenizer
from gateway.text.vocabulary import OpaqueVocabulary
from tests.gateway.tokenizers_for_tests import EURO_BYTES, FAMILIES

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
EXACT = ["byte level", "sentencepiece", "sentencepiece without strip"]


@cache
def tokenizer_of(family: str) -> Tokenizer:
    return Tokenizer(FAMILIES[family]())


def ids_of(family: str, *names: str) -> list[int]:
    source = FAMILIES[family]()
    return [int(source.convert_tokens_to_ids(name)) for name in names]


def pieces(detokenizer: Detokenizer, tokens: Sequence[int]) -> list[str]:
    return [*map(detokenizer.push, tokens), detokenizer.finish()]


@st.composite
def token_lists(draw: st.DrawFn) -> tuple[str, list[int]]:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    size = tokenizer_of(family).size
    return family, draw(st.lists(st.integers(0, size - 1), max_size=40))


@settings(deadline=None)
@given(token_lists())
def test_any_tokens_in_pieces_are_the_text_of_the_whole(
    given_tokens: tuple[str, list[int]],
) -> None:
    family, tokens = given_tokens
    tokenizer = tokenizer_of(family)
    assert "".join(pieces(tokenizer.detokenizer(), tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("family", EXACT)
def test_the_exact_ways_are_chosen_where_they_hold(family: str) -> None:
    assert not isinstance(tokenizer_of(family)._vocabulary, OpaqueVocabulary)


@settings(deadline=None)
@given(token_lists(), st.integers(0, 40))
def test_the_text_after_a_position_depends_only_on_the_tokens_before_it(
    given_tokens: tuple[str, list[int]], position: int
) -> None:
    family, tokens = given_tokens
    whole = tokenizer_of(family).detokenizer()
    part = tokenizer_of(family).detokenizer()
    texts = [whole.push(token) for token in tokens]
    assert [part.push(token) for token in tokens[:position]] == texts[:position]


@settings(deadline=None)
@given(st.text(max_size=30))
def test_text_of_any_script_never_shows_half_a_character(text: str) -> None:
    tokenizer = tokenizer_of("byte level")
    shown = pieces(tokenizer.detokenizer(), tokenizer.encode(text, add_special_tokens=False))
    assert "".join(shown) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in shown)


@settings(deadline=None)
@given(st.text(max_size=30), st.integers(0, 5))
def test_text_survives_a_tokenizer_that_can_only_decode(text: str, known: int) -> None:
    tokenizer = tokenizer_of("byte level")
    opaque = OpaqueVocabulary(tokenizer.decode, lambda t: tokenizer.decode(t, skip_special=False))
    tokens = tokenizer.encode(text, add_special_tokens=False)
    context = tokenizer.encode("words"[:known], add_special_tokens=False)
    shown = pieces(opaque.detokenizer(context), tokens)
    assert "".join(shown) == text
    assert REPLACEMENT in text or not any(REPLACEMENT in piece for piece in shown)
    assert opaque.token_bytes(tokens[0] if tokens else 0)


def test_an_emoji_of_four_tokens_comes_with_the_last_one(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("😀", add_special_tokens=False)
    assert len(tokens) > 1
    shown = pieces(tokenizer.detokenizer(), tokens)
    assert shown == [""] * (len(tokens) - 1) + ["😀", ""]


def test_a_character_that_never_completes_is_replaced_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    detokenizer = tokenizer.detokenizer()
    assert "".join(map(detokenizer.push, tokens)) == "a"
    assert detokenizer.finish() == REPLACEMENT


def test_byte_tokens_wait_for_the_end_of_their_run() -> None:
    tokenizer = tokenizer_of("sentencepiece")
    euro = ids_of("sentencepiece", *EURO_BYTES)
    [word] = ids_of("sentencepiece", "▁world")
    assert pieces(tokenizer.detokenizer(), [*euro, word]) == ["", "", "", "€ world", ""]
    # One stray byte and the tokenizer gives up the whole run.
    broken = [*euro, euro[0], word]
    assert "".join(pieces(tokenizer.detokenizer(), broken)) == REPLACEMENT * 4 + " world"
    assert tokenizer.decode(broken) == REPLACEMENT * 4 + " world"


@pytest.mark.parametrize("family", ["sentencepiece", "metaspace"])
def test_a_text_that_continues_another_keeps_its_first_space(family: str) -> None:
    tokenizer = tokenizer_of(family)
    hello, world, bos = ids_of(family, "▁Hello", "▁world", "<s>")
    alone = pieces(tokenizer.detokenizer(), [world])
    assert "".join(alone) == "world"
    assert "".join(pieces(tokenizer.detokenizer([bos, hello]), [world])) == " world"
    assert "".join(pieces(tokenizer.detokenizer([bos]), [world])) == "world"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_tokens_that_the_tokenizer_does_not_have_have_no_text(family: str) -> None:
    tokenizer = tokenizer_of(family)
    assert "".join(pieces(tokenizer.detokenizer(), [tokenizer.size + 7, 10**6])) == ""
    assert tokenizer.token_bytes(tokenizer.size + 7) == b""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_work_per_token_does_not_grow_with_the_text(family: str) -> None:
    tokenizer = tokenizer_of(family)
    detokenizer = tokenizer.detokenizer()
    looked_at: list[int] = []  # tokens, of each time that some are decoded

    def counting(decode: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counted(given: Any) -> Any:
            looked_at.append(1 if isinstance(given, int) else len(given))
            return decode(given)

        return counted

    [decode] = {"_decode", "_piece", "_token_bytes"} & vars(detokenizer).keys()
    setattr(detokenizer, decode, counting(getattr(detokenizer, decode)))
    tokens = [token % tokenizer.size for token in range(0, 3_000 * 7, 7)]
    # Bytes that never make a character, for those who wait for one.
    tokens += [100] * 3_000
    for token in tokens:
        looked_at.clear()
        detokenizer.push(token)
        assert 0 < len(looked_at) < 100
        assert max(looked_at) < 100


def test_the_demo_models_vocabulary_is_exact(tokenizer: Tokenizer) -> None:
    assert not isinstance(tokenizer._vocabulary, OpaqueVocabulary)
    assert tokenizer.token_bytes(1) == b"<|eos|>"
