"""The cases of the kernel benchmark, their bytes and operations, and their targets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

LAYOUTS = ("layer_major", "block_major", "token_major")


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """Sequences of a step as pairs (query rows, context tokens).

    ``baselines`` maps names of ``benchmarks.gpu.kernels.baselines.ATTENTION`` to the targeted
    ratio of their time to ours, or None if it is only shown.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    block_size: int = 16
    layout: str = "layer_major"
    quantized: bool = False
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    wanted_share: float | None = None
    counts_operations: bool = False  # arithmetic bounds it, not memory
    baselines: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return sum(rows for rows, _ in self.sequences)

    def bytes_moved(self, kv_element_bytes: int, element_bytes: int = 2) -> int:
        """The fewest bytes: keys and values once, queries in, outputs out."""
        tokens = sum(context for _, context in self.sequences)
        kv = 2 * tokens * self.num_kv_heads * self.head_dim * kv_element_bytes
        return kv + 2 * self.num_rows * self.num_heads * self.head_dim * element_bytes

    def operations(self) -> int:
        """Floating-point operations of the two products, over the keys that each row attends to."""
        pairs = sum(
            rows * (context - rows) + rows * (rows + 1) // 2 for rows, context in self.sequences
        )
        return 4 * pairs * self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class PoolShape:
    """A pool of all layers, for block copies and swaps."""

    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    num_blocks: int = 512

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of 16-bit elements."""
        return 2 * self.num_layers * self.num_kv_heads * self.block_size * self.head_dim * 2


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a model's layers."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Suite:
    """All cases of one run."""

    attention: tuple[AttentionCase, ...]
    mapped: AttentionCase  # over virtual memory; one row each
    written_tokens: tuple[int, ...]
    pool: PoolShape
    moved_blocks: int
    layers: LayerSizes
    layer_rows: tuple[int, ...]
    bandwidth_bytes: int


def mixed_contexts(count: int, low: int, high: int) -> tuple[int, ...]:
    """Contexts in [low, high], evenly spread on a logarithmic scale, the longest in the middle."""
    steps = [low * (high / low) ** (i / max(1, count - 1)) for i in range(count)]
    contexts = [round(step) for step in steps]
    return tuple(contexts[0::2] + contexts[1::2][::-1])


def full_suite() -> Suite:
    """The suite for a GPU such as an H200: 16-bit elements, 8 KV heads of 128."""
    return Suite(
        attention=(*_decodes(), *_prefills()),
        # 4 layers of 128 tokens are one page of 2 MiB.
        mapped=AttentionCase("decode 32 × 4K", ((1, 4096),) * 32, 128),
        written_tokens=(4096, 16_384),
        pool=PoolShape(),
        moved_blocks=64,
        layers=LayerSizes(4096, 14_336, 32, 8, 128),  # of Llama 3's 8 B parameters
        layer_rows=(1, 32, 2048),
        bandwidth_bytes=2 * 2**30,
    )


def _decodes() -> tuple[AttentionCase, ...]:
    decode_64 = ((1, 8192),) * 64
    contiguous_and_dense = {
        "contiguous, same kernel": 0.97,
        "dense SDPA": 1 / 1.05,
        "fixed cut, same kernel": None,
    }
    mixed = tuple((1, context) for context in mixed_contexts(64, 1024, 32_768))
    return (
        AttentionCase(
            "decode 64 × 8K", decode_64, 64, wanted_share=0.9, baselines=contiguous_and_dense
        ),
        AttentionCase(
            "decode 64 × 8K", decode_64, 16, wanted_share=0.85, baselines=contiguous_and_dense
        ),
        AttentionCase("decode 64 × 8K", decode_64, 16, "block_major"),
        AttentionCase("decode 64 × 8K", decode_64, 16, "token_major"),
        AttentionCase("decode 64 × 8K, 8-bit", decode_64, 16, quantized=True),
        AttentionCase("decode 64 × 8K, 8-bit", decode_64, 64, quantized=True),
        AttentionCase(
            "decode 32 × 4K",
            ((1, 4096),) * 32,
            16,
            wanted_share=0.85,
            baselines={
                "gather + SDPA": 2.5,
                "contiguous, same kernel": 0.97,
                "fixed cut, same kernel": None,
            },
        ),
        AttentionCase(
            "decode 1 × 128K",
            ((1, 131_072),),
            128,
            wanted_share=0.8,
            baselines={
                "FlexAttention over pages": 1.2,
                "dense SDPA": None,
                "fixed cut, same kernel": None,
            },
        ),
        AttentionCase("decode 1 × 128K", ((1, 131_072),), 16, wanted_share=0.8),
        AttentionCase(
            "decode 64 × 1K–32K", mixed, 16, wanted_share=0.75, baselines={"padded SDPA": 1.0}
        ),
    )


def _prefills() -> tuple[AttentionCase, ...]:
    chunk = (2048, 8192 + 2048)
    return (
        AttentionCase(
            "prefill 2K over 8K",
            (chunk,),
            16,
            counts_operations=True,
            baselines={"dense SDPA": 0.75, "contiguous, same kernel": 0.97},
        ),
        AttentionCase("prefill 16 over 64K", ((16, 65_536),), 16),
        AttentionCase(
            "prefill 2K over 8K and decode 63 × 8K",
            (chunk, *((1, 8192),) * 63),
            16,
            counts_operations=True,
        ),
    )


def smoke_suite() -> Suite:
    """The same parts, small enough for an interpreter."""
    every = {
        "contiguous, same kernel": 0.97,
        "fixed cut, same kernel": None,
        "dense SDPA": None,
        "gather + SDPA": 2.5,
        "padded SDPA": 1.0,
    }
    attention = (
        AttentionCase("decode", ((1, 40),) * 3, wanted_share=0.9, baselines=every),
        AttentionCase("decode", ((1, 40),) * 3, 8, "token_major", quantized=True),
        AttentionCase("one long", ((1, 600),), 128, "block_major"),
        AttentionCase("mixed", ((1, 40), (1, 9)), baselines={"padded SDPA": 1.0}),
        AttentionCase(
            "prefill",
            ((20, 50),),
            counts_operations=True,
            baselines={"dense SDPA": 0.75},
        ),
    )
    return Suite(
        attention=tuple(
            replace(case, num_heads=4, num_kv_heads=2, head_dim=16) for case in attention
        ),
        mapped=replace(
            AttentionCase("decode", ((1, 70), (1, 33))), num_heads=4, num_kv_heads=2, head_dim=16
        ),
        written_tokens=(33,),
        pool=PoolShape(2, 2, 16, 8, 6),
        moved_blocks=3,
        layers=LayerSizes(32, 48, 4, 2, 16),
        layer_rows=(3,),
        bandwidth_bytes=2**20,
    )
