"""Train the demo model: a 5.5 million parameter Llama that writes English sentences.

    python models/train_demo.py --corpus DIR --out models/demo --work /tmp/demo --minutes 75

`--corpus` holds plain English texts as `*.txt.gz`; a line `[Title by Author Year]` opens a book.
Everything is derived from them: the tokenizer, the passages, and the conversations that the chat
template needs. The learning rate and the sequence length follow the share of `--minutes` that is
spent, so a run on a busy machine still ends on time with a fully annealed model.
"""

import argparse
import gzip
import json
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, SYSTEM, USER, ASSISTANT]
VOCAB_SIZE = 4096
SEED = 20

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

# (share of the time at which the phase begins, sequence length in tokens). Short sequences are
# cheaper per token and teach spelling and grammar; the long ones at the end teach the positions
# that a long generation reaches.
LENGTH_PHASES = ((0.0, 256), (0.5, 512), (0.86, 2048))
MAX_POSITIONS = 2048

BOOK_HEADING = re.compile(r"^\[(?P<title>.+?),? by (?P<author>\D+?)(?: \d{4})?\]\s*$")
QUOTED = re.compile(r'"([^"]+)"')
SPEAKER = re.compile(r"^[A-Z][A-Za-z' ]*:$")
# The First Folio's spelling ("vpon", "loue") would teach a second orthography.
OLD_SPELLING = re.compile(r"^The Tragedie")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a run is made of, apart from its data."""

    minutes: float
    peak_lr: float
    weight_decay: float
    dropout: float
    batch_tokens: int
    eval_minutes: float
    compile: bool


@dataclass(slots=True)
class Progress:
    """How far a run has come; saved with every checkpoint."""

    step: int = 0
    epoch: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    best_loss: float = math.inf


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


# ---------------------------------------------------------------------------------------- corpus


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


# ------------------------------------------------------------------------------------- tokenizer


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


# ----------------------------------------------------------------------------------- token stream


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


def batches(
    stream: Stream, progress: Progress, batch_tokens: int, length: Callable[[], int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless inputs and next-token targets: int64 [batch_tokens / length, length] each.

    A resumed run begins a new epoch: its order is another one, and nothing has to be replayed.
    """
    while True:
        progress.epoch += 1
        tokens = stream.epoch(SEED + progress.epoch)
        for start in range(0, len(tokens) - batch_tokens, batch_tokens):
            chunk = tokens[start : start + batch_tokens + 1]
            shape = (-1, length())
            yield chunk[:-1].view(shape), chunk[1:].view(shape)


# ------------------------------------------------------------------------------------------ model


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model, with grouped-query attention (two query heads for one KV head)."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=256,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            intermediate_size=704,
            max_position_embeddings=MAX_POSITIONS,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def add_dropout(model: LlamaForCausalLM, p: float) -> None:
    """Dropout on everything that is added to the residual stream, while training.

    Llama has no dropout there; a dozen passes over a small corpus overfit without.
    """

    def drop(module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
        return nn.functional.dropout(output, p, training=module.training)

    model.model.embed_tokens.register_forward_hook(drop)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


def token_loss(model: LlamaForCausalLM, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token; `inputs` and `targets` are int64 [batch, length]."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits  # [batch, length, vocab]
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, tokens: Tensor, length: int = 512) -> float:
    """Mean loss in nats per token over `tokens`, int64 [num_tokens], in windows of `length`."""
    model.eval()
    rows = (len(tokens) - 1) // length
    inputs = tokens[: rows * length].view(rows, length)
    targets = tokens[1 : rows * length + 1].view(rows, length)
    total = 0.0
    for row in range(0, rows, 8):
        part = slice(row, min(row + 8, rows))
        loss = token_loss(model, inputs[part], targets[part])
        total += loss.item() * (part.stop - part.start)
    model.train()
    return total / rows


def new_optimizer(model: LlamaForCausalLM, weight_decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' gains alone."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.97), fused=True)


def learning_rate(share: float, peak: float) -> float:
    """Linear warm-up over the first 2 % of the time, then a cosine down to 2 % of the peak."""
    if share < 0.02:
        return peak * max(share / 0.02, 0.01)
    angle = math.pi * min((share - 0.02) / 0.98, 1.0)
    return peak * (0.02 + 0.98 * (1 + math.cos(angle)) / 2)


def sequence_length(share: float) -> int:
    """The length of the phase that a share of the time falls in, in tokens."""
    return [length for start, length in LENGTH_PHASES if start <= share][-1]


# ------------------------------------------------------------------------------------------ files


def export(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, scratch: Path
) -> None:
    """Write the model for users: bf16 weights, each file replaced in one step."""
    staging = scratch / "export"
    half = LlamaForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)
    half.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
    )
    half.save_pretrained(staging)
    tokenizer.save_pretrained(staging)
    # transformers 5 writes a class name of its own, but reads the one that version 4 knows, too.
    settings = staging / "tokenizer_config.json"
    names = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings.write_text(json.dumps(names, indent=2) + "\n")
    out.mkdir(parents=True, exist_ok=True)
    for path in staging.iterdir():
        copy = out / f".{path.name}.new"
        copy.write_bytes(path.read_bytes())
        copy.replace(out / path.name)


def save_checkpoint(
    path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW, progress: Progress
) -> None:
    """Everything `--resume` needs, replaced in one step."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": asdict(progress),
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: torch.optim.AdamW) -> Progress:
    """Restore what `save_checkpoint` wrote."""
    state: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    settings = [group["weight_decay"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for group, weight_decay in zip(optimizer.param_groups, settings, strict=True):
        group["weight_decay"] = weight_decay  # this run's, not the saved one's
    return Progress(**state["progress"])


# --------------------------------------------------------------------------------------- training


class Trainer:
    """One run: steps until the time is spent, with evaluations and checkpoints in between."""

    def __init__(self, recipe: Recipe, corpus: Path, out: Path, work: Path) -> None:
        self._recipe, self._out, self._work = recipe, out, work
        work.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(SEED)
        train, valid = split_books(read_books(corpus), held_out=0.03)
        self._tokenizer = train_tokenizer(train)
        self._stream = Stream(self._tokenizer, encode_books(self._tokenizer, train))
        self._valid = Stream(self._tokenizer, encode_books(self._tokenizer, valid)).epoch(SEED)
        self._sample = self._stream.epoch(SEED)[: len(self._valid)]
        self._model = new_model(self._tokenizer)
        add_dropout(self._model, recipe.dropout)
        self._optimizer = new_optimizer(self._model, recipe.weight_decay)
        self.progress = Progress()
        print(
            f"{len(train)} books, {self._stream.epoch(SEED).numel():,} training tokens and "
            f"{self._valid.numel():,} held out, {self._model.num_parameters():,} parameters",
            flush=True,
        )

    def resume(self) -> None:
        """Continue from the last checkpoint in the work directory."""
        self.progress = load_checkpoint(self._work / "last.pt", self._model, self._optimizer)

    @property
    def share(self) -> float:
        """The share of the time that is spent, 0 to 1."""
        return self.progress.elapsed_s / (60 * self._recipe.minutes)

    def run(self) -> None:
        """Train until the time is spent."""
        recipe, progress = self._recipe, self.progress
        loss_of: Callable[..., Tensor] = token_loss
        if recipe.compile:
            loss_of = torch.compile(token_loss, dynamic=False)
        source = batches(
            self._stream, progress, recipe.batch_tokens, lambda: sequence_length(self.share)
        )
        self._model.train()
        next_eval_s = progress.elapsed_s + 60 * recipe.eval_minutes
        recent: list[tuple[float, float]] = []  # (loss, seconds) of the steps not yet printed
        while self.share < 1.0:
            began = time.monotonic()
            loss = self._step(loss_of, *next(source))
            recent.append((loss, time.monotonic() - began))
            progress.elapsed_s += time.monotonic() - began
            if progress.step % 50 == 0:
                self._report(recent)
                recent.clear()
            if progress.elapsed_s >= next_eval_s or self.share >= 1.0:
                progress.elapsed_s += self._evaluate_and_save()
                next_eval_s = progress.elapsed_s + 60 * recipe.eval_minutes

    def _step(self, loss_of: Callable[..., Tensor], inputs: Tensor, targets: Tensor) -> float:
        rate = learning_rate(self.share, self._recipe.peak_lr)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(self._model, inputs, targets)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.progress.step += 1
        self.progress.tokens += inputs.numel()
        return loss.item()

    def _report(self, recent: Sequence[tuple[float, float]]) -> None:
        losses, seconds = zip(*recent, strict=True)
        progress = self.progress
        left_s = 60 * self._recipe.minutes - progress.elapsed_s
        print(
            f"step {progress.step} epoch {progress.epoch} loss {sum(losses) / len(losses):.3f} "
            f"{len(recent) * self._recipe.batch_tokens / sum(seconds):,.0f} tokens/s "
            f"{progress.tokens / 1e6:.1f}M tokens ETA {left_s / 60:.1f} min",
            flush=True,
        )

    def _evaluate_and_save(self) -> float:
        """Measure, checkpoint, and export the best and the last model; returns seconds."""
        began, progress = time.monotonic(), self.progress
        valid, train = (evaluate(self._model, part) for part in (self._valid, self._sample))
        print(f"step {progress.step} valid {valid:.4f} train {train:.4f}", flush=True)
        # The windows here are shorter than those of the last phase, so the last model may lose
        # a little on them; it alone has seen every position, and is always the one to keep.
        if valid < progress.best_loss or self.share >= 1.0:
            progress.best_loss = min(valid, progress.best_loss)
            export(self._model, self._tokenizer, self._out, self._work)
        save_checkpoint(self._work / "last.pt", self._model, self._optimizer, progress)
        record = asdict(progress) | {"valid_loss": valid, "train_loss": train}
        with (self._work / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        return time.monotonic() - began


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description="Train the demo model on public-domain texts.")
    parser.add_argument("--corpus", type=Path, required=True, help="directory of *.txt.gz")
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--work", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--minutes", type=float, default=75.0, help="training time")
    parser.add_argument("--resume", action="store_true", help="continue from --work")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--eval-minutes", type=float, default=4.0)
    parser.add_argument("--no-compile", action="store_true", help="do without torch.compile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    recipe = Recipe(
        minutes=args.minutes,
        peak_lr=args.lr,
        weight_decay=args.weight_decay,
        dropout=args.dropout,
        batch_tokens=args.batch_tokens,
        eval_minutes=args.eval_minutes,
        compile=not args.no_compile,
    )
    trainer = Trainer(recipe, args.corpus, args.out, args.work)
    if args.resume:
        trainer.resume()
    trainer.run()


if __name__ == "__main__":
    main()
