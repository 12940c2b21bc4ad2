"""Arguments of the sampling kernel: a row of int64 numbers (see kernel_arguments).

Behind those below come the addresses of sampling parameters, as ``shared.sampling`` declares them.
"""

import zlib

from kernels.cpu.runtime.kernel_arguments import ArgumentLayout
from shared.sampling import PARAMETERS, Effect

# Behind the two counters that threads share:
LOGITS, LOGITS_ROW = 2, 3
VOCAB_SIZE = 4
NUM_SAMPLED = 5
ROWS = 6  # int64, rows of the logits to sample from
KEYS, MORE_KEYS = 7, 8  # uint32, of each of them
TOKENS = 9  # int64 of all rows: the argmax, replaced by the sampled token
SCRATCH, SCRATCH_BYTES = 10, 11  # per thread
_FIRST_PARAMETER = 12

# Each an array of its column's type with one element per sampled row, in this order.
SAMPLE_PARAMETERS = tuple(each for each in PARAMETERS.values() if each.effect is Effect.SAMPLE)
SAMPLE_LAYOUT = ArgumentLayout(_FIRST_PARAMETER + len(SAMPLE_PARAMETERS))

# Tokens are sorted into bins by their distance to the largest logit; what lies farther than the
# last bin has less than e^-32 of its probability.
NUM_BINS = 2048
BINS_PER_UNIT = NUM_BINS / 32.0


def place_of(name: str) -> int:
    """Index of a sampling parameter's address among the arguments."""
    return _FIRST_PARAMETER + [each.name for each in SAMPLE_PARAMETERS].index(name)


def parameters_version() -> int:
    """A number that changes with the places of the parameters."""
    names = " ".join(each.name for each in SAMPLE_PARAMETERS)
    return zlib.crc32(names.encode())


def padded(vocab_size: int) -> int:
    """Elements of a row in whole vectors."""
    return -(-vocab_size // 16) * 16


def scratch_bytes(vocab_size: int) -> int:
    """Bytes per thread: two rows of float32, bins' counts and masses, and a vector of either."""
    return 8 * padded(vocab_size) + 16 * NUM_BINS + 128
