"""Models, by the shapes that determine how much they compute and store."""

from dataclasses import dataclass

from shared.errors import SettingsError

BYTES_PER_VALUE = 2  # of weights, keys and values


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder-only transformer.

    Attributes:
        name: as users write it.
        num_layers: of attention and feed-forward.
        hidden_size: of a token between layers.
        num_heads: of queries.
        num_kv_heads: of keys and values; fewer with grouped-query attention.
        head_dim: of each head.
        ffn_size: inner size of the feed-forward layer.
        num_ffn_matrices: 2, or 3 with a gate.
        vocab_size: tokens.
        max_model_len: tokens of prompt and output together.
        ties_embeddings: whether one matrix embeds tokens and gives logits.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    num_ffn_matrices: int
    vocab_size: int
    max_model_len: int
    ties_embeddings: bool

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers, with which every token is multiplied."""
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        ffn = self.num_ffn_matrices * self.ffn_size
        return self.num_layers * self.hidden_size * (heads + ffn)

    @property
    def vocab_weights(self) -> int:
        """Numbers in the matrix that gives logits."""
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return BYTES_PER_VALUE * self.layer_weights + self.embedding_bytes

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embeddings and of the output layer."""
        num_vocab = 1 if self.ties_embeddings else 2
        return BYTES_PER_VALUE * num_vocab * self.vocab_weights

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of all layers on all devices."""
        return 2 * BYTES_PER_VALUE * self.num_layers * self.num_kv_heads * self.head_dim


MODELS = (
    Model("OPT-13B", 40, 5_120, 40, 40, 128, 20_480, 2, 50_272, 2_048, True),
    Model("OPT-66B", 64, 9_216, 72, 72, 128, 36_864, 2, 50_272, 2_048, True),
    Model("OPT-175B", 96, 12_288, 96, 96, 128, 49_152, 2, 50_272, 2_048, True),
    Model("LLaMA-13B", 40, 5_120, 40, 40, 128, 13_824, 3, 32_000, 2_048, False),
    Model("Llama-3-8B", 32, 4_096, 32, 8, 128, 14_336, 3, 128_256, 8_192, False),
    Model("Llama-3-70B", 80, 8_192, 64, 8, 128, 28_672, 3, 128_256, 8_192, False),
    Model("Yi-6B", 32, 4_096, 32, 4, 128, 11_008, 3, 64_000, 200_000, False),
    Model("Yi-34B", 60, 7_168, 56, 8, 128, 20_480, 3, 64_000, 200_000, False),
)


def find_model(name: str) -> Model:
    """The model of this name, in any capitalization.

    Raises:
        SettingsError: there is none.
    """
    for model in MODELS:
        if model.name.lower() == name.lower():
            return model
    known = ", ".join(model.name for model in MODELS)
    raise SettingsError("--model", name, f"known are {known}")
