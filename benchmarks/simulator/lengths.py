"""Lengths of prompts and outputs: published traces, and look-alikes where there is no trace.

The look-alikes have the means that the PagedAttention paper prints for its two datasets (section
6.1, Fig. 11), and the shape of the public data behind them: short ones (greetings, one-word
answers) and long ones (pasted text, essays), each log-normal.
"""

import csv
import gzip
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from shared.errors import SettingsError

_QUANTILES = 4_096  # over which a distribution's mean is computed


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of one request, in tokens; both at least 1."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Part:
    """One log-normal component of a distribution."""

    share: float
    median: float  # relative to the other parts; the mean sets the scale
    sigma: float  # standard deviation of the logarithm, without the limit


@dataclass(frozen=True, slots=True)
class Mixture:
    """Positive numbers, each from one of several log-normal components, clipped at a limit."""

    mean: float  # of the drawn numbers, after clipping
    parts: tuple[Part, ...]

    def draw(self, count: int, limit: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Draw integers in [1, limit], [count]."""
        shares = [part.share for part in self.parts]
        chosen = random.choice(len(shares), count, p=shares)
        medians = np.array([part.median for part in self.parts])
        sigmas = np.array([part.sigma for part in self.parts])
        logs = np.log(medians)[chosen] + sigmas[chosen] * random.standard_normal(count)
        return _cut(np.exp(_shift(self, limit) + logs), limit)


@lru_cache(maxsize=64)
def _shift(mixture: Mixture, limit: int) -> float:
    """The shift of all logarithms with which the mean after clipping is as wanted."""
    levels = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    normal = np.array([NormalDist().inv_cdf(level) for level in levels])
    spread = [np.log(part.median) + part.sigma * normal for part in mixture.parts]
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = sum(
            part.share * _cut(np.exp(np.minimum(middle + logs, 40.0)), limit).mean()
            for part, logs in zip(mixture.parts, spread, strict=True)
        )
        if mean < mixture.mean:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset of the paper."""

    name: str
    trace: str  # file with its lengths
    prompt: Mixture  # without the file
    output: Mixture

    def draw(self, count: int, limit: int, random: np.random.Generator) -> list[Lengths]:
        """Draw look-alikes; prompt and output together have at most ``limit`` tokens."""
        prompts = self.prompt.draw(count, limit - 1, random)
        outputs = np.minimum(self.output.draw(count, limit - 1, random), limit - prompts)
        return [Lengths(*pair) for pair in zip(prompts.tolist(), outputs.tolist(), strict=True)]

    def draw_from(
        self, folder: Path, count: int, limit: int, random: np.random.Generator
    ) -> list[Lengths]:
        """Requests of the trace, without repetition; those longer than ``limit`` tokens are
        skipped.

        Raises:
            SettingsError: the trace is missing, cannot be read, or is too short.
        """
        found = [
            lengths
            for lengths in read_lengths(folder / self.trace)
            if lengths.prompt + lengths.output <= limit
        ]
        if len(found) < count:
            reason = f"{self.trace} has {len(found)} requests that fit, {count} are needed"
            raise SettingsError("--trace-dir", str(folder), reason)
        return [found[index] for index in random.choice(len(found), count, replace=False)]


DATASETS = (
    Dataset(
        "alpaca",
        "alpaca_5000_gpt2bpe_lengths.csv.gz",
        Mixture(19.31, (Part(0.74, 13, 0.38), Part(0.26, 24, 0.59))),
        Mixture(58.45, (Part(0.64, 19, 1.17), Part(0.36, 88, 0.42))),
    ),
    Dataset(
        "sharegpt",
        "sharegpt_opt_lengths_le2048.csv.gz",
        Mixture(161.31, (Part(0.765, 25, 0.98), Part(0.235, 420, 0.79))),
        Mixture(337.99, (Part(0.25, 59, 1.3), Part(0.75, 330, 0.67))),
    ),
)


def read_lengths(path: Path) -> list[Lengths]:
    """Read all requests of a trace: gzipped CSV with ``prompt_tokens`` and ``output_tokens``.

    Rows without a prompt or without an output are skipped.

    Raises:
        SettingsError: names the file and the error.
    """
    try:
        with gzip.open(path, "rt", newline="") as file:
            rows = [
                Lengths(int(row["prompt_tokens"]), int(row["output_tokens"]))
                for row in csv.DictReader(file)
            ]
    except (OSError, EOFError, zlib.error) as error:
        raise SettingsError("--trace-dir", str(path.parent), f"{path.name}: {error}") from None
    except KeyError as error:
        reason = f"{path.name} has no column {error}"
        raise SettingsError("--trace-dir", str(path.parent), reason) from None
    except (TypeError, ValueError) as error:
        reason = f"{path.name} has a length that is no whole number: {error}"
        raise SettingsError("--trace-dir", str(path.parent), reason) from None
    return [row for row in rows if row.prompt > 0 and row.output > 0]


def _cut(values: NDArray[np.float64], limit: int) -> NDArray[np.int64]:
    return np.clip(np.rint(values), 1, limit).astype(np.int64)
