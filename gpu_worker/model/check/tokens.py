"""Makes the token sequences of the check: a text, and random ids."""

from collections.abc import Sequence

import torch

from gpu_worker.model.tokenizer_file import TokenizerFile
from shared.logs import EventLog

# A text gives activations as in use; random ids give those where rounding matters most. The text
# is long enough for the shortened windows of a check.
_TEXT = (
    "The lighthouse keeper counted 42 ships before breakfast, wrote their names into a book, and "
    "wondered why none of them had answered his signal. In winter the sea freezes near the shore; "
    "then the ferries stop, the post comes by sledge, and children walk to school across the ice. "
    "def area(radius): return 3.14159 * radius ** 2. What is the capital of France? Paris, of "
    "course, although the answer has not always been as simple as that."
)
_SHORTER = 5  # tokens by which the second sequence is shorter than the first

log = EventLog(__name__)


def check_sequences(
    vocab_size: int, length: int, text: Sequence[int], device: torch.device
) -> list[torch.Tensor]:
    """Two sequences of token ids [length], [length - 5], int64: text, and random ids.

    Args:
        vocab_size: limit of the random ids.
        length: tokens of the longer sequence.
        text: token ids of a text, repeated to this length; empty: both are random.
        device: of the result.
    """
    generator = torch.Generator().manual_seed(0)
    lengths = (length, max(1, length - _SHORTER))
    found = [torch.randint(vocab_size, (n,), generator=generator) for n in lengths]
    usable = [token for token in text if 0 <= token < vocab_size]
    if usable:
        times = -(-length // len(usable))
        found[0] = torch.tensor((usable * times)[:length])
    return [tokens.to(device) for tokens in found]


def text_tokens(tokenizer: TokenizerFile) -> list[int]:
    """Token ids of a short text by the model's own tokenizer; empty if it has no fast one."""
    try:
        from tokenizers import Tokenizer

        ids: list[int] = Tokenizer.from_str(tokenizer.text).encode(_TEXT).ids
    except Exception as error:  # the tokenizers library raises plain Exceptions
        log.info("checked with random tokens only", because=error)
        return []
    return ids
