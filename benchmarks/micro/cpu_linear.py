"""Times linear layers and decode steps on this CPU, with PageStream's layers and with torch's.

    python -m benchmarks.micro.cpu_linear [--shape 162m | --model smollm2] [--rows 1,4,16]
        [--weights 4] [--json]

Layers have the sizes of a Llama with random weights, of 162 million parameters by default, or of a
given model of Llama's shape, whose own weights the decode steps then use. Both sides alternate
within one run, and the best time of each counts: other work on the machine makes times longer,
never shorter. With ``--weights`` 8 or 4, our single layers have weights in so many bits. Single
threads are timed by CPU time instead of wall time. Weights are read from
memory, as in a model: many copies of a layer are used in turn.
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
from torch import nn
from torch.nn.functional import linear, silu

from benchmarks.models.model_folder import MODEL_HELP, model_folder
from benchmarks.models.random_model import SHAPES
from gpu_worker.model.attention import ATTENTION_NAME, PagedStep, register_attention
from gpu_worker.model.fusion.cpu_fusion import fuse
from gpu_worker.model.fusion.linear_packing import LinearPacker
from gpu_worker.model.quantization.quantized_linear import QuantizedLinear
from gpu_worker.model.quantization.requested_format import quantized_weight
from gpu_worker.model.ragged_model import RaggedModel
from kernels.cpu.attention.backend import CpuBackend
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.linear.library_blocks import find_library
from kernels.cpu.linear.library_trial import LibraryTrial
from kernels.cpu.linear.weight_packing import PackedLayers
from kernels.cpu.runtime.instruction_set import detect
from kernels.interface import LayerCache, RaggedBatch
from kernels.quantized_weight import BITS

ROWS = (1, 4, 16, 64, 256, 512)
BATCHES = (1, 16, 64)
CONTEXT_TOKENS = 192
BLOCK_SIZE = 16
_COPIES_BYTES = 64 * 1024 * 1024  # more than caches hold
_SECONDS_EACH = 0.4


@dataclass(frozen=True, slots=True)
class Layer:
    """A product [rows, K] @ [K, N] of a layer; gated: N holds both gate and up projection."""

    name: str
    in_features: int
    out_features: int
    gated: bool = False


def layers_of(config: transformers.LlamaConfig) -> tuple[Layer, ...]:
    """The kinds of linear layers in a Llama."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return (
        Layer("q, k, v", hidden, queries + 2 * keys),
        Layer("o", queries, hidden),
        Layer("silu(gate) * up", hidden, 2 * inner, gated=True),
        Layer("down", inner, hidden),
        Layer("output", hidden, config.vocab_size),
    )


@torch.inference_mode()
def compare_layer(
    kernels: CpuLayers, layer: Layer, num_rows: int, dtype: torch.dtype, bits: int | None = None
) -> dict[str, float]:
    """Best milliseconds of one call, ours and torch's; ours has weights in so many bits."""
    num_weights = layer.in_features * layer.out_features
    copies = max(1, 8 * _COPIES_BYTES // (num_weights * (bits or 8 * dtype.itemsize)))
    weights = [
        torch.randn(layer.out_features, layer.in_features, dtype=dtype) for _ in range(copies)
    ]
    halves = [weight.chunk(2) for weight in weights]
    packer = LinearPacker(kernels, dtype)
    compiled = [
        kernels.linear(_packed(packer, parts if layer.gated else (whole,), bits), dtype)
        for whole, parts in zip(weights, halves, strict=True)
    ]
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


def _packed(
    packer: LinearPacker, weights: Sequence[torch.Tensor], bits: int | None
) -> PackedLayers:
    """One weight, or those of gate and up."""
    linears = [_linear(weight, bits) for weight in weights]
    found = packer.pack(linears) if len(linears) == 1 else packer.pack_gated(*linears)
    assert found is not None
    return found


def _linear(weight: torch.Tensor, bits: int | None) -> nn.Linear | QuantizedLinear:
    quantized = None if bits is None else quantized_weight(weight, bits)
    if quantized is not None:
        return QuantizedLinear(quantized)
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(weight, requires_grad=False)
    return module


@dataclass(frozen=True, slots=True)
class Source:
    """The origin of the model of the decode steps.

    Attributes:
        config: its configuration.
        folder: of its weights; None: they are random.
    """

    config: transformers.LlamaConfig
    folder: str | None

    def build(self, dtype: torch.dtype) -> RaggedModel:
        """Load or make the model, with paged attention; bfloat16 holds its weights without loss."""
        register_attention()
        options = {"dtype": torch.bfloat16, "attn_implementation": ATTENTION_NAME}
        auto = transformers.AutoModelForCausalLM
        if self.folder is None:
            torch.manual_seed(0)
            model = auto.from_config(self.config, **options)
        else:
            model = auto.from_pretrained(self.folder, **options)
        return RaggedModel(model.to(dtype).eval().requires_grad_(False))


def choose_source(shape: str, model: str | None) -> Source:
    """The model in a folder, which must have Llama's shape, else one with random weights.

    Raises:
        ValueError: the folder holds another kind of model.
    """
    if model is None:
        return Source(transformers.LlamaConfig(**SHAPES[shape].as_llama()), None)
    config = transformers.AutoConfig.from_pretrained(model)
    if not isinstance(config, transformers.LlamaConfig):
        raise ValueError(f"--model={model}: its type is {config.model_type}, not llama")
    return Source(config, model)


@torch.inference_mode()
def compare_steps(
    source: Source, dtype: torch.dtype, batches: Sequence[int]
) -> dict[int, dict[str, float]]:
    """Best milliseconds of a decode step by batch size, with our layers and with torch's."""
    instructions = detect()
    assert instructions is not None, "this CPU is not served"
    plain, fused = source.build(dtype), source.build(dtype)
    kernels = CpuLayers(instructions, LibraryTrial(find_library(instructions)))
    fuse(fused.model, kernels, dtype)
    found = {}
    for batch in batches:
        steps = {
            "on": decode_step(fused, source.config, batch),
            "off": decode_step(plain, source.config, batch),
        }
        found[batch] = best_ms(steps)
    return found


def decode_step(
    model: RaggedModel, config: transformers.LlamaConfig, num_seqs: int
) -> Callable[[int], None]:
    """A forward pass that gives every sequence a token, over a pool with random contents."""
    blocks_each = -(-CONTEXT_TOKENS // BLOCK_SIZE)
    num_blocks = num_seqs * blocks_each
    shape = (2, num_blocks, config.num_key_value_heads, BLOCK_SIZE, config.head_dim)
    caches = {}
    for module in model.observe_layers():
        key, value = torch.randn(shape, dtype=model.dtype)
        caches[module.module] = LayerCache(key, value)
    tables = torch.randperm(num_blocks).to(torch.int32).view(num_seqs, blocks_each)
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
    tokens = torch.randint(config.vocab_size, (num_seqs,))
    positions = torch.full((num_seqs,), last)
    rows = torch.arange(num_seqs)

    def run(_: int) -> None:
        model.forward(tokens, positions, step, rows)

    return run


def best_ms(sides: dict[str, Callable[[int], None]]) -> dict[str, float]:
    """The best time of each call; the calls alternate."""
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


def measure(
    source: Source, rows: Sequence[int], batches: Sequence[int], bits: int | None = None
) -> dict[str, Any]:
    """Measure layers and steps of all types."""
    instructions = detect()
    assert instructions is not None, "this CPU is not served"
    kernels = CpuLayers(instructions, LibraryTrial(find_library(instructions)))
    found: dict[str, Any] = {"instructions": instructions.name, "threads": torch.get_num_threads()}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        layers = {}
        for layer in layers_of(source.config):
            print(f"{name}: {layer.name} ...", file=sys.stderr)
            layers[layer.name] = {
                count: compare_layer(kernels, layer, count, dtype, bits) for count in rows
            }
        print(f"{name}: decode steps ...", file=sys.stderr)
        found[name] = {"layers": layers, "steps": compare_steps(source, dtype, batches)}
    return found


def main() -> None:
    """Measure and print tables or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="162m", help="of random weights")
    parser.add_argument("--model", type=model_folder, help=MODEL_HELP + "; instead of --shape")
    parser.add_argument("--threads", type=int, help="by default torch's own number")
    parser.add_argument("--rows", type=_numbers, default=ROWS, help="of single layers")
    parser.add_argument("--weights", type=int, choices=BITS, help="bits, of our single layers")
    parser.add_argument("--batches", type=_numbers, default=BATCHES, help="of decode steps")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        source = choose_source(args.shape, args.model)
    except ValueError as error:
        parser.error(str(error))
    found = measure(source, args.rows, args.batches, args.weights)
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
