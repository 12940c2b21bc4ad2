"""The demo model's texts: books and conversations, the tokenizer, and the order of training."""

import gzip
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, SYSTEM, USER, ASSISTANT]
VOCAB_SIZE = 4096
MAX_POSITIONS = 2048

# A user's or a system's words end where the next role begins; only the assistant's end with EOS,
# so that a reply ends itself and a user's text never has to hold a token that stops generation.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content | trim }}
{%- elif content -%}
{%- for part in content if part.type == 'text' -%}{{ part.text | trim }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role in ('system', 'developer') -%}{{- '<|system|>' + text(message.content) -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + text(message.content) + eos_token -}}
{%- else -%}{{- '<|user|>' + text(message.content) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""

BOOK_HEADING = re.compile(r"^\[(?P<title>.+?),? by (?P<author>\D+?)(?: \d{4})?\]\s*$")
QUOTED = re.compile(r'"([^"]+)"')
SPEAKER = re.compile(r"^[A-Z][A-Za-z' ]*:$")
# The First Folio's spelling ("vpon", "loue") would teach a second orthography.
OLD_SPELLING = re.compile(r"^The Tragedie")


@dataclass(frozen=True, slots=True)
class Book:
    """One text: paragraphs without hard line wraps, and the conversations found in them."""

    name: str
    paragraphs: list[str]
    conversations: list[list[str]]


@dataclass(frozen=True, slots=True)
class TokenBook:
    """A `Book` as token ids, without special tokens."""

    name: list[int]
    paragraphs: list[list[int]]
    conversations: list[list[list[int]]]


def unwrap(paragraph: str) -> str:
    """Join the wrapped lines of prose; keep the lines of verse and of plays.

    Verse begins its lines with capitals, wrapped prose only now and then.
    """
    lines = [line.rstrip() for line in paragraph.replace("_", "").splitlines()]
    rest = [line.lstrip() for line in lines[1:]]
    if not rest or SPEAKER.match(lines[0]):
        return "\n".join(lines)
    capitals = sum(line[:1].isupper() for line in rest)
    if capitals > 0.6 * len(rest):
        return "\n".join(lines)
    return re.sub(r"\s+", " ", " ".join(lines)).strip()


def spoken(paragraph: str) -> str | None:
    """The words spoken in a paragraph that opens with a speech, or None if it is narration."""
    if not paragraph.startswith('"'):
        return None
    # An unclosed quotation runs on into the next paragraph; close it here.
    closed = paragraph if paragraph.count('"') % 2 == 0 else paragraph + '"'
    return " ".join(part.strip() for part in QUOTED.findall(closed)) or None


def conversations_in(paragraphs: Sequence[str]) -> list[list[str]]:
    """Runs of two or more consecutive speeches, at most eight speeches each."""
    found: list[list[str]] = []
    run: list[str] = []
    for paragraph in [*paragraphs, ""]:
        words = spoken(paragraph)
        if words is not None:
            run.append(words)
        if words is None or len(run) == 8:
            if len(run) >= 2:
                found.append(run)
            run = []
    return found


def make_book(name: str, text: str) -> Book:
    """Cut a text into paragraphs at its blank lines."""
    blocks = (block.strip("\n") for block in re.split(r"\n\s*\n", text))
    paragraphs = [unwrap(block) for block in blocks if block.strip()]
    return Book(name, paragraphs, conversations_in(paragraphs))


def read_books(corpus: Path) -> list[Book]:
    """All books of the `*.txt.gz` files in `corpus`, in the order of their file names."""
    books: list[Book] = []
    for path in sorted(corpus.glob("*.txt.gz")):
        name, lines = path.name.removesuffix(".txt.gz"), list[str]()
        text = gzip.decompress(path.read_bytes()).decode("utf-8")
        for line in [*text.splitlines(), "[The end by nobody]"]:
            heading = BOOK_HEADING.match(line)
            if heading is None:
                lines.append(line)
                continue
            if any(lines) and not OLD_SPELLING.match(name):
                books.append(make_book(name, "\n".join(lines)))
            name, lines = f"{heading['title']} by {heading['author'].strip()}", []
    if not books:
        raise SystemExit(f"no *.txt.gz with text in {corpus}")
    return books


def split_books(books: Sequence[Book], held_out: float) -> tuple[list[Book], list[Book]]:
    """Hold out the last part of every book, so that no held-out passage has a trained neighbour."""
    train: list[Book] = []
    valid: list[Book] = []
    for book in books:
        cut = round(len(book.paragraphs) * (1 - held_out))
        for part, paragraphs in (
            (train, book.paragraphs[:cut]),
            (valid, book.paragraphs[cut:]),
        ):
            part.append(Book(book.name, paragraphs, conversations_in(paragraphs)))
    return train, valid


def train_tokenizer(books: Sequence[Book]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any UTF-8 text can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(("\n\n".join(book.paragraphs) for book in books), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS} $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode_books(tokenizer: PreTrainedTokenizerFast, books: Sequence[Book]) -> list[TokenBook]:
    """Encode every paragraph and every speech once; epochs only rearrange them."""
    raw = tokenizer.backend_tokenizer

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in raw.encode_batch(list(texts), add_special_tokens=False)]

    return [
        TokenBook(
            encode([book.name])[0],
            encode([paragraph + "\n\n" for paragraph in book.paragraphs]),
            [encode(speeches) for speeches in book.conversations],
        )
        for book in books
    ]


class Stream:
    """Token ids of passages and conversations in a random order, new for every epoch."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, books: Sequence[TokenBook]) -> None:
        ids = tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS)
        self._bos, self._eos, _, self._system, self._user, self._assistant = ids
        self._books = books

    def epoch(self, seed: int) -> Tensor:
        """All the text once: int64 [num_tokens]."""
        rng = random.Random(seed)
        documents: list[list[int]] = []
        for book in self._books:
            documents.extend(self._passages(book, rng))
            documents.extend(self._chat(book, turns, rng) for turns in book.conversations)
        rng.shuffle(documents)
        return torch.tensor([token for document in documents for token in document])

    def _passages(self, book: TokenBook, rng: random.Random) -> Iterator[list[int]]:
        start = 0
        while start < len(book.paragraphs):
            # From one paragraph, so that the end of a text is often seen, to forty, so that
            # a long context holds one story.
            end = start + round(math.exp(rng.uniform(0.0, math.log(40.0))))
            body = [token for part in book.paragraphs[start:end] for token in part]
            yield [self._bos, *body[:-1], self._eos]  # EOS instead of the last blank line
            start = end

    def _chat(self, book: TokenBook, turns: list[list[int]], rng: random.Random) -> list[int]:
        document = [self._bos]
        if rng.random() < 0.3:
            document += [self._system, *book.name]
        first = rng.randrange(2) if len(turns) > 2 else 0  # either speaker may be the user
        for asked, replied in zip(turns[first::2], turns[first + 1 :: 2], strict=False):
            document += [self._user, *asked, self._assistant, *replied, self._eos]
        return document
