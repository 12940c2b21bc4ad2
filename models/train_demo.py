"""Train the demo model: a 5.5 million parameter Llama that writes English sentences.

    python models/train_demo.py --corpus DIR --out models/demo --work /tmp/demo --minutes 75

`--corpus` holds plain English texts as `*.txt.gz`; a line `[Title by Author Year]` opens a book.
Everything is derived from them: the tokenizer, the passages, and the conversations that the chat
template needs. The learning rate and the sequence length follow the share of `--minutes` that is
spent, so a run on a busy machine still ends on time with a fully annealed model.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from demo_corpus import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    Stream,
    encode_books,
    read_books,
    split_books,
    train_tokenizer,
)
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

SEED = 20

# (share of the time at which the phase begins, sequence length in tokens). Short sequences are
# cheaper per token and teach spelling and grammar; the long ones at the end teach the positions
# that a long generation reaches.
LENGTH_PHASES = ((0.0, 256), (0.5, 512), (0.86, 2048))


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


# ----------------------------------------------------------------------------------- token stream


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
    # transformers 5 writes a class name of its own, but reads that of version 4, too.
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
