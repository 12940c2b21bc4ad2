"""Times linear layers, and whole decode steps, on this CPU with compiled layers and with torch's.

    python -m benchmarks.linear_cpu [--threads N] [--rows 1,4,16] [--batches 1,16] [--json]

The shapes are those of a Llama of 162 million parameters with random weights. Both sides take turns
within one run, and the best of each is what counts: other work on the machine makes times longer,
never shorter. One thread is timed by what it computes, not by the wall. Weights are read from
memory, as in a model: many copies of a layer take turns.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.nn.functional import linear, silu

from gpu_worker.attention import ATTENTION_NAME, PagedStep, register_attention
from gpu_worker.fusion import fuse
from gpu_worker.model import RaggedModel
from kernels.cpu import CpuBackend
from kernels.cpu_isa import detect
from kernels.cpu_layers import CpuLayers
from kernels.cpu_pack import pack, pack_gated
from kernels.interface import LayerCache, RaggedBatch

HIDDEN, INNER, LAYERS, HEADS, VOCAB = 768, 3072, 12, 12, 32_000
ROWS = (1, 4, 16, 64, 256)
BATCHES = (1, 16, 64)
CONTEXT_TOKENS = 192
BLOCK_SIZE = 16
_COPIES_BYTES = 64 * 1024 * 1024  # more than caches hold
_SECONDS_EACH = 0.4


@dataclass(frozen=True, slots=True)
class Layer:
    """A product [rows, K] @ [K, N] of a layer; gated: N is the gate's and up's together."""

    name: str
    in_features: int
    out_features: int
    gated: bool = False


SHAPES = (
    Layer("q, k, v", HIDDEN, 3 * HIDDEN),
    Layer("o", HIDDEN, HIDDEN),
    Layer("silu(gate) * up", HIDDEN, 2 * INNER, gated=True),
    Layer("down", INNER, HIDDEN),
    Layer("output", HIDDEN, VOCAB),
)


@torch.inference_mode()
def compare_layer(
    kernels: CpuLayers, layer: Layer, num_rows: int, dtype: torch.dtype
) -> dict[str, float]:
    """Best milliseconds of one call, ours and torch's."""
    bytes_each = layer.in_features * layer.out_features * dtype.itemsize
    copies = max(1, _COPIES_BYTES // bytes_each)
    weights = [
        torch.randn(layer.out_features, layer.in_features, dtype=dtype) for _ in range(copies)
    ]
    halves = [weight.chunk(2) for weight in weights]
    packed = (
        [pack_gated(gate, up) for gate, up in halves]
        if layer.gated
        else [pack([w]) for w in weights]
    )
    compiled = [kernels.linear(layers, dtype) for layers in packed]
    x = torch.randn(num_rows, layer.in_features, dtype=dtype)

    def theirs(turn: int) -> None:
        if layer.gated:
            gate, up = halves[turn % copies]
            _ = silu(linear(x, gate)) * linear(x, up)
        else:
            linear(x, weights[turn % copies])

    def ours(turn: int) -> None:
        compiled[turn % copies](x)

    return best_ms({"ours": ours, "torch": theirs})


def build_model(dtype: torch.dtype) -> RaggedModel:
    """The Llama with random weights, which bfloat16 holds without loss, and our attention."""
    register_attention()
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCAB,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
    )
    return RaggedModel(model.to(dtype).eval().requires_grad_(False))


@torch.inference_mode()
def compare_steps(dtype: torch.dtype, batches: Sequence[int]) -> dict[int, dict[str, float]]:
    """Best milliseconds of a decode step by batch size, with compiled layers and without."""
    instructions = detect()
    assert instructions is not None, "this CPU is not served"
    plain, fused = build_model(dtype), build_model(dtype)
    fuse(fused.model, CpuLayers(instructions), dtype)
    found = {}
    for batch in batches:
        steps = {"on": decode_step(fused, batch), "off": decode_step(plain, batch)}
        found[batch] = best_ms(steps)
    return found


def decode_step(model: RaggedModel, num_seqs: int) -> Callable[[int], None]:
    """One forward pass that gives every sequence a token more, over a pool with random contents."""
    blocks_each = -(-CONTEXT_TOKENS // BLOCK_SIZE)
    shape = (2, num_seqs * blocks_each, HEADS, BLOCK_SIZE, HIDDEN // HEADS)
    caches = {}
    for module in model.observe_layers():
        key, value = torch.randn(shape, dtype=model.dtype)
        caches[module.module] = LayerCache(key, value)
    tables = torch.randperm(num_seqs * blocks_each).to(torch.int32).view(num_seqs, blocks_each)
    last = CONTEXT_TOKENS - 1
    batch = RaggedBatch(
        slot_mapping=tables[:, last // BLOCK_SIZE].long() * BLOCK_SIZE + last % BLOCK_SIZE,
        block_tables=tables,
        context_lens=torch.full((num_seqs,), CONTEXT_TOKENS, dtype=torch.int32),
        query_starts=torch.arange(num_seqs + 1, dtype=torch.int32),
        max_query_len=1,
        max_context_len=CONTEXT_TOKENS,
    )
    step = PagedStep(CpuBackend(), caches, batch)
    tokens = torch.randint(VOCAB, (num_seqs,))
    positions = torch.full((num_seqs,), last)
    rows = torch.arange(num_seqs)

    def run(_: int) -> None:
        model.forward(tokens, positions, step, rows)

    return run


def best_ms(sides: dict[str, Callable[[int], None]]) -> dict[str, float]:
    """The best time of each, taking turns."""
    best = dict.fromkeys(sides, float("inf"))
    for run in sides.values():
        run(0)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began, turn = time.perf_counter(), 0
    while turn < 3 or time.perf_counter() - began < _SECONDS_EACH * len(sides):
        turn += 1
        for name, run in sides.items():
            start = clock()
            run(turn)
            best[name] = min(best[name], clock() - start)
    return {name: 1e3 * seconds for name, seconds in best.items()}


def measure(rows: Sequence[int], batches: Sequence[int]) -> dict[str, Any]:
    """Everything, by type."""
    instructions = detect()
    assert instructions is not None, "this CPU is not served"
    kernels = CpuLayers(instructions)
    found: dict[str, Any] = {"instructions": instructions.name, "threads": torch.get_num_threads()}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        layers = {}
        for layer in SHAPES:
            print(f"{name}: {layer.name} ...", file=sys.stderr)
            layers[layer.name] = {
                count: compare_layer(kernels, layer, count, dtype) for count in rows
            }
        print(f"{name}: decode steps ...", file=sys.stderr)
        found[name] = {"layers": layers, "steps": compare_steps(dtype, batches)}
    return found


def main() -> None:
    """Measure and print tables or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, help="by default torch's own number")
    parser.add_argument("--rows", type=_numbers, default=ROWS, help="of single layers")
    parser.add_argument("--batches", type=_numbers, default=BATCHES, help="of decode steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    found = measure(args.rows, args.batches)
    if args.json:
        print(json.dumps(found))
        return
    print(
        f"{found['instructions']}, {found['threads']} threads; milliseconds, ours / torch (ratio)"
    )
    for name in ("bfloat16", "float32"):
        print(f"\n{name:<18}" + "".join(f"{f'{rows} rows':>26}" for rows in args.rows))
        for layer, by_rows in found[name]["layers"].items():
            cells = (_cell(times["ours"], times["torch"]) for times in by_rows.values())
            print(f"{layer:<18}" + "".join(f"{cell:>26}" for cell in cells))
        print(
            f"\n{name + ', decode step':<24}" + "".join(f"{f'batch {b}':>26}" for b in args.batches)
        )
        cells = (_cell(times["on"], times["off"]) for times in found[name]["steps"].values())
        print(f"{'':<24}" + "".join(f"{cell:>26}" for cell in cells))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _cell(ours: float, theirs: float) -> str:
    return f"{ours:.2f} / {theirs:.2f} ({theirs / ours:.1f} x)"


if __name__ == "__main__":
    main()
