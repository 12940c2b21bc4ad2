"""Compiles the Triton kernels for an H100/H200 without one, and prints what ptxas made of them.

Run by test_triton.py; prints one JSON object per kernel.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton.attention_kernel import paged_attention_kernel
from kernels.triton.attention_launch import MERGE_TILES
from kernels.triton.block_move_kernel import move_blocks_kernel
from kernels.triton.cache_write_kernel import write_kv_kernel
from kernels.triton.gate_kernel import silu_gate_kernel
from kernels.triton.layers import GATE_TILE, ROTARY_TILE, ROTARY_WARPS, linear_tile, norm_warps
from kernels.triton.linear_kernel import linear_kernel
from kernels.triton.merge_kernel import merge_kernel
from kernels.triton.norm_kernel import add_rms_norm_kernel, rms_norm_kernel
from kernels.triton.rotary_kernel import rotate_kernel, rotate_write_kernel
from kernels.triton.sampling.penalty_kernel import penalty_kernel
from kernels.triton.sampling.sample_kernel import sample_kernel
from kernels.triton.sampling.sampler import PENALTY_TILE, PENALTY_WARPS, SAMPLE_TILE, SAMPLE_WARPS
from kernels.triton.tiles import choose_tile

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
}
TYPES = {
    "block_tables": "*i32",
    "context_lens": "*i32",
    "query_starts": "*i32",
    "slot_mapping": "*i64",
    "addresses": "*i64",
    "shares": "*i64",
    "packed": "*i64",
    "sources": "*i64",
    "targets": "*i64",
    "partials": "*fp32",
    "key_scales": "*fp32",
    "value_scales": "*fp32",
    "partial_logs": "*fp32",
    "scale": "fp32",
    "key_scale": "fp32",
    "value_scale": "fp32",
    "key_inverse_scale": "fp32",
    "value_inverse_scale": "fp32",
    "softcap": "fp32",
    "factor": "*fp32",
    "epsilon": "fp32",
    "places": "*i32",
    "temperature": "*fp32",
    "top_k": "*i64",
    "top_p": "*fp32",
    "log_min_p": "*fp32",
    "keys": "*i32",
    "tokens": "*i64",
    "broken": "*i8",
    "counts": "*i32",
    "rows": "*i64",
    "logit_rows": "*i64",
    "penalties": "*fp32",
}
LAYERS = (
    "x", "residual", "total", "gate_up", "query_out", "key_out", "cos", "sin", "weight", "bias",
)  # fmt: skip
ELEMENTS = ("query", "out", "key", "value", "logits", *LAYERS)
CACHES = ("key_cache", "value_cache")
# Known only when called, and rarely multiples of 16.
ANY_INTEGER = (
    "window", "num_tokens", "num_seqs", "capacity", "table_stride", "num_inner", "num_rows",
    "num_random",
)  # fmt: skip


def build(kernel, dtype, constants, options, cache_dtype=None):
    """The compiled kernel, its strides and addresses being multiples of 16 as in a launch."""
    signature, values, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            values[(index,)] = constants[name]
            continue
        if name in CACHES:
            signature[name] = POINTERS[cache_dtype or dtype]
        else:
            signature[name] = POINTERS[dtype] if name in ELEMENTS else TYPES.get(name, "i32")
        if signature[name] != "fp32" and name not in ANY_INTEGER:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=TARGET, options=options)


def resources(compiled):
    """Registers and spilled bytes per thread, asynchronous copies and tensor-core instructions."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    ptx = compiled.asm["ptx"]
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "shared_bytes": compiled.metadata.shared,
        "async_copies_16_bytes": ptx.count("cp.async.cg"),
        "global_16_bytes": len(re.findall(r"(?:ld|st)\.global[\w.:]*\.v(?:2\.b64|4\.b32)", ptx)),
        "mma": ptx.count("mma.sync"),
        "wgmma": ptx.count("wgmma.mma_async"),
    }


def attention(
    dtype,
    head_dim,
    short,
    block_size=16,
    cache_dtype=None,
    split=True,
    paged=True,
    fixed_cut=False,
):
    widened = cache_dtype is not None and cache_dtype.itemsize < dtype.itemsize
    tile = choose_tile(head_dim, group=4, dtype=dtype, short=short, widened=widened)
    constants = work_constants(tile, head_dim, short, fixed_cut) | {
        "BLOCK_SIZE": block_size,
        "PAGED": paged,
        "SPLIT": split,
        "HAS_SOFTCAP": False,
        "HAS_SCALES": cache_dtype == torch.int8,
        "UPCAST": False,
    }
    cache_dtype = cache_dtype or dtype
    return build(paged_attention_kernel, dtype, constants, tile.options(), cache_dtype)


def merge(dtype, head_dim, short):
    tile = choose_tile(head_dim, group=4, dtype=dtype, short=short)
    rows, pieces = MERGE_TILES[short]
    constants = work_constants(tile, head_dim, short)
    constants |= {"MERGE_ROWS": rows, "MERGE_PIECES": pieces}
    return build(merge_kernel, dtype, constants, {"num_warps": 4})


def work_constants(tile, head_dim, short, fixed_cut=False):
    return {
        "SEQS": 64,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "TILE_ROWS": tile.rows,
        "TILE_KEYS": tile.keys,
        "SHORT_TOKENS": choose_tile(head_dim, group=4, dtype=torch.bfloat16, short=True).rows // 4,
        "SHORT": short,
        "MIN_PIECE_TILES": tile.min_piece_tiles,
        "FIXED_PIECE_TILES": 512 // tile.keys if fixed_cut else 0,
        "MOST_FIXED_PIECES": 32,
        "HAS_WINDOW": False,
    }


def write(dtype, head_dim, block_size=16, cache_dtype=None):
    constants = {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": block_size,
        "TILE_TOKENS": 16,
        "QUANTIZE": False,
        "HAS_SCALES": cache_dtype == torch.int8,
    }
    return build(write_kv_kernel, dtype, constants, {"num_warps": 4}, cache_dtype)


def move(dtype, head_dim, block_size=16, num_kv_heads=8):
    words = head_dim * dtype.itemsize // 8
    rows = num_kv_heads * block_size
    constants = {
        "WORD": tl.int64,
        "ALIGNED": True,
        "FROM_PACKED": False,
        "TO_PACKED": False,
        "NUM_ROWS": rows,
        "BLOCK_SIZE": block_size,
        "ROW_WORDS": words,
        "PADDED_WORDS": triton.next_power_of_2(words),
        "PACKED_WORDS": 64 * rows * words,
        "BLOCK_STRIDE": rows * words,
        "HEAD_STRIDE": block_size * words,
        "SLOT_STRIDE": words,
        "TILE_ROWS": 32,
    }
    return build(move_blocks_kernel, dtype, constants, {"num_warps": 4})


def norm(dtype, width):
    constants = {"WIDTH": width, "PADDED_WIDTH": triton.next_power_of_2(width)}
    return build(rms_norm_kernel, dtype, constants, {"num_warps": norm_warps(width)})


def add_norm(dtype, width):
    constants = {"WIDTH": width, "PADDED_WIDTH": triton.next_power_of_2(width)}
    return build(add_rms_norm_kernel, dtype, constants, {"num_warps": norm_warps(width)})


def gate(dtype, width):
    constants = {"WIDTH": width, "TILE_WIDTH": GATE_TILE}
    return build(silu_gate_kernel, dtype, constants, {"num_warps": 4})


def rotary(dtype, head_dim):
    constants = {
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "PADDED_HALF": triton.next_power_of_2(head_dim // 2),
        "TILE_HEADS": ROTARY_TILE,
    }
    return build(rotate_kernel, dtype, constants, {"num_warps": ROTARY_WARPS})


def rotary_write(dtype, head_dim, block_size=16, cache_dtype=None):
    constants = {
        "NUM_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "PADDED_HALF": triton.next_power_of_2(head_dim // 2),
        "BLOCK_SIZE": block_size,
        "TILE_HEADS": ROTARY_TILE,
        "QUANTIZE": cache_dtype == torch.float8_e4m3fn,
        "HAS_SCALES": cache_dtype == torch.int8,
    }
    options = {"num_warps": ROTARY_WARPS}
    return build(rotate_write_kernel, dtype, constants, options, cache_dtype)


def sample(dtype):
    constants = {"VOCAB_SIZE": 128_256, "TILE": SAMPLE_TILE}
    return build(sample_kernel, dtype, constants, {"num_warps": SAMPLE_WARPS})


def penalty():
    constants = {"VOCAB_SIZE": 128_256, "TILE": PENALTY_TILE}
    options = {"num_warps": PENALTY_WARPS, "enable_fp_fusion": False}
    return build(penalty_kernel, torch.float32, constants, options)


def linear(dtype, transposed):
    tile = linear_tile(dtype)
    constants = {
        "weight_out_stride" if transposed else "weight_in_stride": 1,
        "IN_FEATURES": 4096,
        "OUT_FEATURES": 14336,
        "HAS_BIAS": True,
        "TILE_ROWS": tile.rows,
        "TILE_OUTPUTS": tile.outputs,
        "TILE_INPUTS": tile.inputs,
        "UPCAST": False,
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    return build(linear_kernel, dtype, constants, options)


def main() -> None:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    eight = torch.float8_e4m3fn
    for dtype, head_dim, short, options in (
        (bf16, 64, True, {}),
        (bf16, 128, True, {}),
        (bf16, 128, True, {"paged": False}),
        (bf16, 128, True, {"fixed_cut": True}),
        (bf16, 128, True, {"cache_dtype": eight}),
        (bf16, 128, True, {"cache_dtype": torch.int8}),
        (bf16, 64, False, {"cache_dtype": torch.int8}),
        (fp32, 128, True, {"cache_dtype": bf16}),
        (bf16, 256, True, {"block_size": 64}),
        (bf16, 64, False, {"split": False}),
        (bf16, 80, False, {}),
        (bf16, 128, False, {"split": False}),
        (fp32, 128, False, {"split": False}),
        (bf16, 128, True, {"block_size": 8}),
        (bf16, 128, True, {"block_size": 256}),
        (fp16, 80, True, {"block_size": 32}),
        (fp16, 96, True, {"block_size": 128}),
        (fp16, 256, True, {"block_size": 16}),
        (fp32, 80, True, {"block_size": 8}),
        (fp32, 128, True, {"block_size": 256}),
        (bf16, 128, False, {"block_size": 256}),
        (bf16, 256, False, {"block_size": 32}),
        (fp16, 80, False, {"block_size": 128}),
        (fp16, 96, False, {"block_size": 8}),
        (fp32, 96, False, {"block_size": 32}),
    ):
        tile = choose_tile(head_dim, 4, dtype, short)
        report = resources(attention(dtype, head_dim, short, **options))
        report |= {"kernel": "decode" if short else "prefill", "head_dim": head_dim}
        report |= {"dtype": str(dtype)[6:], "cache": str(options.get("cache_dtype", dtype))[6:]}
        report |= {"block_size": options.get("block_size", 16)}
        report |= {"threads": 32 * tile.num_warps, "at_once": tile.programs_per_processor}
        print(json.dumps(report))
    for dtype, head_dim, short in ((bf16, 128, True), (fp16, 96, False), (fp32, 80, True)):
        print(json.dumps(resources(merge(dtype, head_dim, short)) | {"kernel": "merge"}))
    for dtype, head_dim, block_size in ((bf16, 128, 16), (fp16, 80, 8), (fp32, 96, 256)):
        print(json.dumps(resources(write(dtype, head_dim, block_size)) | {"kernel": "write"}))
        print(json.dumps(resources(move(dtype, head_dim, block_size)) | {"kernel": "move"}))
    print(json.dumps(resources(write(bf16, 128, cache_dtype=torch.int8)) | {"kernel": "write"}))
    for dtype, width in ((bf16, 4096), (fp16, 128), (fp32, 16384)):
        print(json.dumps(resources(norm(dtype, width)) | {"kernel": "norm"}))
        print(json.dumps(resources(add_norm(dtype, width)) | {"kernel": "add and norm"}))
    for dtype, head_dim in ((bf16, 128), (fp16, 80), (fp32, 256)):
        print(json.dumps(resources(rotary(dtype, head_dim)) | {"kernel": "rotary"}))
    for dtype, head_dim, cache_dtype in (
        (bf16, 128, bf16), (bf16, 128, torch.int8), (bf16, 128, eight), (fp32, 80, fp32)
    ):  # fmt: skip
        report = resources(rotary_write(dtype, head_dim, cache_dtype=cache_dtype))
        print(json.dumps(report | {"kernel": "rotary and write"}))
    print(json.dumps(resources(gate(bf16, 14336)) | {"kernel": "gate"}))
    for dtype in (bf16, fp32):
        print(json.dumps(resources(sample(dtype)) | {"kernel": "sample"}))
    print(json.dumps(resources(penalty()) | {"kernel": "penalty"}))
    for dtype, transposed in ((bf16, False), (fp16, True), (fp32, False)):
        report = resources(linear(dtype, transposed)) | {"dtype": str(dtype)[6:]}
        print(json.dumps(report | {"kernel": "linear"}))


if __name__ == "__main__":
    main()
