"""Settings of the worker."""

from dataclasses import dataclass

from shared.errors import SettingsError
from shared.service_settings import StepSettings
from shared.settings import byte_size, power_of_two, setting


@dataclass(frozen=True, slots=True)
class WorkerSettings(StepSettings):
    """Settings of one worker process, which has one model, one device and one KV pool."""

    device: str | None = setting(
        None, "Device: cpu, cuda, or cuda:1; auto takes cuda if there is a GPU."
    )
    dtype: str | None = setting(
        None,
        "Type of weights and activations; auto takes the model's own.",
        choices=("float32", "bfloat16", "float16"),
    )
    quantization: str | None = setting(
        None,
        "Weights of linear layers: int8 or int4 rounds those of any model to so many bits at load, "
        "on CPUs; none dequantizes those of a quantized model; auto leaves them as they are.",
        choices=("none", "int8", "int4"),
    )
    kv_dtype: str | None = setting(
        None,
        "Type of keys and values in the KV cache; auto takes that of --dtype. int8 has a scale for "
        "each token and KV head; fp8, on GPUs that have it, has none. In 8 bits about twice as "
        "many tokens fit into the same memory, and attention over long contexts reads half.",
        choices=("float32", "bfloat16", "float16", "fp8", "int8"),
    )
    attention_backend: str | None = setting(
        None,
        "Attention kernels; auto takes triton on GPUs and cpu elsewhere. sdpa needs --kv-memory "
        "virtual.",
        choices=("reference", "cpu", "triton", "sdpa"),
    )
    layer_kernels: str = setting(
        "auto",
        "Layers around attention: auto takes PageStream's linear layers and norms on CPUs with "
        "AVX2 or AVX-512, and fused projections, norms and rotary embeddings on GPUs; off takes "
        "torch's.",
        choices=("auto", "off"),
    )
    kv_memory: str = setting(
        "paged",
        "How kernels find blocks: paged follows block tables, virtual maps the blocks of a "
        "sequence into contiguous addresses.",
        choices=("paged", "virtual"),
    )
    kv_layout: str = setting(
        "layer_major",
        "Order of a paged pool: layer_major, or block_major, in which a block of all layers is "
        "contiguous, so that one copy swaps it.",
        choices=("layer_major", "block_major"),
    )
    deterministic: bool = setting(
        False,
        "A sequence's logits do not depend, bit for bit, on the other sequences in the batch. On "
        "GPUs contexts are then split by their own length alone, and all linear layers use tiles "
        "of one size, which is slower; PageStream's layers on CPUs have this property anyway. On "
        "CPUs, logits are also equal for tokens computed by decodes and in chunks; without bf16 "
        "dot products this makes decodes slower.",
    )
    block_size: int = setting(
        16, "Tokens in a KV block, a power of two.", parse=power_of_two, minimum=1, maximum=256
    )
    num_blocks: int | None = setting(
        None, "Blocks in the KV pool; auto derives them from --kv-memory-bytes.", minimum=1
    )
    kv_memory_bytes: int | None = setting(
        None,
        "Memory for the KV pool; auto takes a share of the free memory.",
        parse=byte_size,
        minimum=1,
    )
    num_host_blocks: int | None = setting(
        None,
        "Blocks in the host pool, for swapping; auto derives them from --host-kv-memory-bytes.",
        minimum=0,
    )
    host_kv_memory_bytes: int | None = setting(
        None,
        "Memory for the host pool, 0 for no swapping; auto takes a share of the free memory.",
        parse=byte_size,
        minimum=0,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "Share of a GPU's memory that may be used, other processes included; the KV pool gets what "
        "is left beside weights and the largest step.",
        minimum=0.05,
        maximum=1.0,
    )
    cuda_graphs: str = setting(
        "auto",
        "Whether steps are padded to a few sizes and launched as one graph each: auto does so on "
        "GPUs where the attention backend allows it.",
        choices=("auto", "off"),
    )
    compile: bool = setting(
        False,
        "Compile the model's layers with torch.compile instead of fusing them; starting takes "
        "longer. On CPUs only with --layer-kernels off.",
    )
    max_model_len: int | None = setting(
        None, "Longest sequence in tokens; auto takes the model's own.", minimum=2
    )
    num_threads: int | None = setting(
        None,
        "CPU threads of the model; auto takes all cores, which scripts/serve divides among the "
        "workers that it starts.",
        minimum=1,
    )
    tensor_parallel_size: int = setting(
        1,
        "Workers that have a part of the model each, which compute every step together. "
        "scripts/serve starts all of them; by hand, start one for each --rank.",
        minimum=1,
        maximum=64,
    )
    rank: int = setting(
        0, "Which of these workers this process is; scripts/serve sets it.", minimum=0, maximum=63
    )
    rank_host: str = setting(
        "127.0.0.1",
        "Address of this worker at which those of other ranks reach it. Their connections are "
        "neither encrypted nor authenticated: use a network that others cannot reach.",
    )
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model.")
    worker_metrics_host: str = setting("127.0.0.1", "Address of the worker's /metrics.")
    worker_metrics_port: int = setting(
        9102, "Port of the worker's /metrics; 0 for none.", minimum=0, maximum=65535
    )

    def __post_init__(self) -> None:
        if self.rank >= self.tensor_parallel_size:
            raise SettingsError(
                "--rank",
                self.rank,
                f"must be below --tensor-parallel-size, which is {self.tensor_parallel_size}",
            )
