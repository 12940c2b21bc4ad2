"""The items of the preflight: the smallest case of everything that a worker on a GPU runs.

Each raises an error if its result is wrong. Unused memory of pools holds NaNs, so that a kernel
that reads what it must not shows it.
"""

import importlib
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.interface import AttentionParams, LayerCache, RaggedBatch
from kernels.reference import ReferenceBackend

_BLOCK, _HEADS, _KV_HEADS, _DIM = 16, 8, 2, 64
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32  # the interpreter's bf16 is cut


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise AssertionError(what)


def _close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    difference = (found.double() - expected.double()).abs().max().item()
    _require(difference <= _TOLERANCE[found.dtype], f"{what}: off by {difference}")


def imports(device: str) -> None:
    """Versions, and that every module of a worker on a GPU can be imported."""
    print("python", platform.python_version())
    for name in ("torch", "triton", "transformers", "numpy"):
        print(name, importlib.import_module(name).__version__)
    for name in ("gpu_worker.service", "gpu_worker.startup.build", "kernels.triton.backend"):
        importlib.import_module(name)
    if device == "cuda":
        print(torch.cuda.get_device_name(), torch.version.cuda)
        (torch.ones(8, device="cuda") + 1).sum().item()


def _attention(device: str, query_lens: tuple[int, ...], context_lens: tuple[int, ...]) -> None:
    from kernels.select import select_backend

    dtype, generator = _dtype(device), torch.Generator(device).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    widths = [-(-context // _BLOCK) for context in context_lens]
    num_blocks = 1 + sum(widths)
    shape = (num_blocks, _KV_HEADS, _BLOCK, _DIM)
    cache = LayerCache.of(*(torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in "kv"))
    tables = torch.full((len(widths), max(widths)), 2**30, dtype=torch.int32, device=device)
    order = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
    used = 0
    for row, (width, context) in enumerate(zip(widths, context_lens, strict=True)):
        blocks = order[used : used + width]
        used += width
        tables[row, :width] = blocks.int()
        places = torch.arange(context, device=device)
        for pool in (cache.key, cache.value):
            pool[blocks[places // _BLOCK], :, places % _BLOCK] = random(context, _KV_HEADS, _DIM)
    starts = torch.tensor([0, *query_lens], device=device).cumsum(0).int()
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    num_tokens = sum(query_lens)
    slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)
    last = context_lens[0] - 1
    slots[query_lens[0] - 1] = int(tables[0, last // _BLOCK]) * _BLOCK + last % _BLOCK
    batch = RaggedBatch(slots, tables, lens, starts, max(query_lens), max(context_lens))
    query = random(num_tokens, _HEADS, _DIM)
    params = AttentionParams(_DIM**-0.5)
    key, value = random(num_tokens, _KV_HEADS, _DIM), random(num_tokens, _KV_HEADS, _DIM)
    found, expected = (torch.zeros_like(query) for _ in "oo")
    backend = select_backend("triton", device, dtype)
    backend.write_kv(key, value, cache, slots)
    backend.attend(query, cache, batch, params, found)
    ReferenceBackend().attend(query, cache, batch, params, expected)
    _close(found, expected, "attention")
    _require(
        torch.equal(cache.key[0], torch.full_like(cache.key[0], torch.nan))
        or bool(cache.key[0].isnan().all()),
        "a block of no sequence was written",
    )


def decode_attention(device: str) -> None:
    """One row for each sequence, split and whole."""
    _attention(device, (1, 1, 1), (700, 33, 1))


def prompt_attention(device: str) -> None:
    """Chunks of prompts beside a decoding sequence."""
    _attention(device, (40, 1, 17), (100, 65, 17))


def block_moves(device: str) -> None:
    """Copies inside the pool, and packing for a swap."""
    from kernels.interface import BlockMover
    from kernels.reference_block_mover import ReferenceMover
    from kernels.triton.block_mover import TritonMover

    layers = [
        LayerCache.of(*(torch.randn(6, _KV_HEADS, _BLOCK, _DIM, device=device) for _ in "kv"))
        for _ in range(2)
    ]
    sources, targets = (torch.tensor(each, device=device) for each in ([1, 3], [0, 5]))
    found: list[list[torch.Tensor]] = []
    movers: tuple[BlockMover, ...] = (TritonMover(layers), ReferenceMover(layers))
    for mover in movers:
        mover.copy(sources, targets)
        packed = torch.zeros((4, mover.bytes_per_block), dtype=torch.uint8, device=device)
        mover.pack(sources, packed, targets % 4)
        mover.unpack(packed, targets % 4, targets)
        found.append([packed, *(each.clone() for layer in layers for each in layer.tensors)])
    for ours, theirs in zip(*found, strict=True):
        _require(torch.equal(ours, theirs), "moved blocks differ")


def layer_kernels(device: str) -> None:
    """Norm, gate, rotary embeddings, and a linear layer of independent rows."""
    from kernels.triton import layers

    dtype = _dtype(device)
    x = torch.randn(3, 128, device=device).to(dtype)
    factor = torch.rand(128, device=device)
    wide = x.float()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * factor
    _close(layers.rms_norm(x, factor, 1e-5), normed, "norm")
    gate, up = wide[:, :64], wide[:, 64:]
    _close(layers.silu_gate(x), torch.nn.functional.silu(gate) * up, "gate")
    weight = (torch.randn(72, 128, device=device) / 16).to(dtype)
    _close(layers.linear(x, weight, None), wide @ weight.float().T, "linear")
    heads = torch.randn(3, 4, _DIM, device=device).to(dtype)
    cos, sin = (torch.randn(3, _DIM, device=device).to(dtype) for _ in "cs")
    left, right = heads.float().chunk(2, -1)
    turned = torch.cat((-right, left), -1)
    expected = heads.float() * cos.float()[:, None] + turned * sin.float()[:, None]
    found, _ = layers.rotate(heads, heads[:, :2], cos, sin)
    _close(found, expected, "rotary")


def sampling(device: str) -> None:
    """Greedy, filtered and broken rows, and penalties."""
    from kernels.triton.sampling import sampler

    logits = torch.randn(4, 5000, device=device)
    logits[2, 77] = 100.0
    logits[3, 5] = torch.nan
    places = torch.tensor([-1, 0, 1, 2], dtype=torch.int32, device=device)
    ones = torch.ones(3, device=device)
    keys = torch.arange(6, dtype=torch.int32, device=device).view(2, 3)
    top_k = torch.tensor([1, 0, 0], device=device)
    tokens, broken = sampler.sample(
        logits, places, ones, top_k, 0.9 * ones, -torch.inf * ones, keys
    )
    best = logits.argmax(1)
    _require(broken.tolist() == [False, False, False, True], f"broken rows {broken.tolist()}")
    _require(torch.equal(tokens[:3], best[:3]), f"tokens {tokens.tolist()}, {best.tolist()}")
    rows = torch.tensor([0], device=device)
    counts = torch.full((1, 5000), 2, dtype=torch.int32, device=device)
    penalties = torch.tensor([1.0, 0.5, 0.25], device=device).view(1, 3, 1)
    before = logits[0].clone()
    sampler.penalize(logits, rows, counts, rows, penalties)
    _close(logits[0], before - 0.75, "penalties")


def graph_capture(device: str) -> None:
    """Kernels captured in a CUDA graph see what lies in their inputs when it is replayed."""
    from kernels.triton import layers

    x, factor = torch.randn(4, 256, device=device), torch.ones(256, device=device)
    layers.rms_norm(x, factor, 1e-6)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = layers.rms_norm(x, factor, 1e-6)
    x.copy_(torch.randn(4, 256, device=device))
    graph.replay()
    _close(out, layers.rms_norm(x, factor, 1e-6), "replay")


def virtual_memory(device: str) -> None:
    """A block is mapped at a second address, where what was written is read, and unmapped."""
    tokens(device, "virtual")


def model_tokens(device: str) -> None:
    """A tiny model's greedy tokens are those of transformers, in fp32."""
    tokens(device, "paged")


def tokens(device: str, kv_memory: str) -> None:
    """Run whole steps of a tiny model, and compare the tokens with transformers'."""
    import json

    from benchmarks.gpu import worker_steps

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        shape = "paged" if kv_memory == "virtual" else "tiny"
        minutes = "0.9" if device == "cuda" else "2.5"  # transformers' tokens must fit, too
        flags = ["--shape", shape, "--dtype", "float32", "--device", device, "--minutes", minutes]
        code = worker_steps.main([*flags, "--kv-memory", kv_memory, "--json", str(file)])
        rows = json.loads(file.read_text())["rows"]
    same = [baseline["same_tokens"] for row in rows for baseline in row["baselines"]]
    _require(code == 0 and bool(same) and min(same) == 1, f"exit code {code}; equal tokens {same}")


ITEMS: dict[str, Callable[[str], None]] = {
    "imports": imports,
    "decode-attention": decode_attention,
    "prompt-attention": prompt_attention,
    "block-moves": block_moves,
    "layer-kernels": layer_kernels,
    "sampling": sampling,
    "graph-capture": graph_capture,
    "model-tokens": model_tokens,
    "virtual-memory": virtual_memory,
}
"""All items, in the order in which they run."""

_ONLY_GPU = ("graph-capture", "virtual-memory")


def why_not(name: str, device: str) -> str | None:
    """Why a device cannot run this item; None: it can."""
    return "needs a GPU" if device != "cuda" and name in _ONLY_GPU else None
