"""The operator's file of prefixes is read as a whole, or refused with line, field and value."""

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.pins.prefix_file import read_prefixes
from gateway.prompts.control_tokens import Conversation
from gateway.text.tokenizer import Tokenizer
from shared.errors import SettingsError


def write(path: Path, *lines: Any) -> str:
    file = path / "prefixes.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_text("\n".join(text) + "\n", encoding="utf-8")
    return str(file)


def test_texts_conversations_and_tokens_become_prefixes(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    system = {"role": "system", "content": "Answer “briefly”."}
    file = write(
        tmp_path,
        {"prompt": "It was a dark night", "name": "novel"},
        "",
        {"messages": [system, {"role": "user", "content": "Who?"}], "cache_salt": "tenant"},
        {"tokens": [5, 6, 7]},
    )
    novel, chat, tokens = read_prefixes(file, tokenizer, "demo")
    assert novel.tokens.tolist() == tokenizer.encode("It was a dark night")
    text = tokenizer.decode(chat.tokens.tolist(), skip_special=False)
    assert text.startswith("<|bos|>")
    assert text.endswith("<|user|>Who?"), "the next turn is not begun"
    assert tokens.tokens.tolist() == [5, 6, 7]
    assert [found.name for found in (novel, chat, tokens)] == ["novel", "line 3", "line 4"]
    assert [found.cache_salt for found in (novel, chat, tokens)] == ["", "tenant", ""]


def test_a_chat_prefix_is_how_such_requests_begin(tmp_path: Path, tokenizer: Tokenizer) -> None:
    system = {"role": "system", "content": "You speak like a pirate."}
    [prefix] = read_prefixes(write(tmp_path, {"messages": [system]}), tokenizer, "demo")
    question = [system, {"role": "user", "content": "Where is the gold?"}]
    chat = tokenizer.render_chat(Conversation(question))
    prompt = tokenizer.encode(chat, add_special_tokens=False)
    assert prompt[: len(prefix.tokens)] == prefix.tokens.tolist()


def test_names_of_prefixes_depend_on_tokens_and_salt_alone(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    text = "Good day"
    lines: list[dict[str, Any]] = [
        {"prompt": text},
        {"tokens": tokenizer.encode(text), "name": "the same"},
        {"prompt": text, "cache_salt": "x"},
        {"prompt": "Good night"},
    ]
    ids = [found.prefix_id for found in read_prefixes(write(tmp_path, *lines), tokenizer, "demo")]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 3


def test_a_prefix_of_another_model_is_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [{"tokens": [1]}, {"tokens": [2], "model": "demo"}, {"tokens": [3], "model": "other"}]
    found = read_prefixes(write(tmp_path, *lines), tokenizer, "demo")
    assert [prefix.tokens.tolist() for prefix in found] == [[1], [2]]


def test_no_file_is_no_prefix(tokenizer: Tokenizer) -> None:
    assert read_prefixes(None, tokenizer, "demo") == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{prompt}", ["no JSON"]),
        ("[1, 2]", ["a JSON map", "a list of 2"]),
        ({"prompt": 5}, ["prompt=5"]),
        ({"prompt": ""}, ["prompt=''"]),
        ({"tokens": []}, ["tokens"]),
        ({"tokens": [1, -2]}, ["tokens[1]=-2"]),
        ({"tokens": [1, 2**31]}, ["tokens[1]=2147483648"]),
        ({"tokens": [1, True]}, ["tokens[1]=True"]),
        ({"messages": []}, ["messages"]),
        ({"messages": [{"role": "pirate", "content": "x"}]}, ["messages[0].role='pirate'"]),
        ({"messages": [{"role": "user"}]}, ["messages[0].content", "required"]),
        ({"messages": [{"role": "user", "content": "x", "to": "y"}]}, ["messages[0].to='y'"]),
        ({"prompt": "x", "salt": "y"}, ["salt='y'", "not supported"]),
        ({"prompt": "x", "name": ""}, ["name=''"]),
        ({"prompt": "x", "cache_salt": 1}, ["cache_salt=1"]),
        ({"prompt": "x", "tokens": [1]}, ["one of", "prompt and tokens are given"]),
        ({"name": "empty"}, ["one of prompt, messages, tokens", "none is given"]),
        ("[" * 100_000, ["line 2"]),
    ],
)
def test_a_bad_line_is_refused_with_its_number_field_and_value(
    line: Any, words: list[str], tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = write(tmp_path, {"prompt": "good"}, line)
    with pytest.raises(SettingsError) as caught:
        read_prefixes(file, tokenizer, "demo")
    for word in (f"--pinned-prefixes='{file}'", "line 2", *words):
        assert word in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    latin = tmp_path / "latin"
    latin.write_bytes(b'{"prompt": "\xe4"}')
    for path, word in ((tmp_path / "missing", "No such file"), (latin, "utf-8")):
        with pytest.raises(SettingsError, match=word):
            read_prefixes(str(path), tokenizer, "demo")


def test_too_many_prefixes_are_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = write(tmp_path, *({"tokens": [number]} for number in range(1_001)))
    with pytest.raises(SettingsError, match="1001 prefixes"):
        read_prefixes(file, tokenizer, "demo")
