"""How long prompts and outputs are: published traces, and look-alikes where there is no trace.

The look-alikes are log-normal, with the means that the PagedAttention paper prints for its two
datasets (section 6.1, Fig. 11) and the spread of the public data that they were taken from.
"""

import csv
import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from shared.errors import SettingsError

_QUANTILES = 4_096  # in which a distribution's mean is computed


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of one request, in tokens; both at least 1."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Positive numbers whose logarithms are normally distributed, cut at a limit."""

    mean: float  # of what is drawn, the cut included
    sigma: float  # standard deviation of the logarithm, without the cut

    def draw(self, count: int, limit: int, random: np.random.Generator) -> NDArray[np.int64]:
        """Whole numbers from [1, limit], [count]."""
        location = self._location(limit)
        return _cut(np.exp(location + self.sigma * random.standard_normal(count)), limit)

    def _location(self, limit: int) -> float:
        """Mean of the logarithm with which the mean comes out right in spite of the cut."""
        levels = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
        normal = np.array([NormalDist().inv_cdf(level) for level in levels])
        low, high = -10.0, float(np.log(limit))
        for _ in range(50):
            middle = (low + high) / 2
            if _cut(np.exp(middle + self.sigma * normal), limit).mean() < self.mean:
                low = middle
            else:
                high = middle
        return low


@dataclass(frozen=True, slots=True)
class Dataset:
    """A dataset of the paper."""

    name: str
    trace: str  # file with its lengths
    prompt: LogNormal  # without the file
    output: LogNormal

    def draw(self, count: int, limit: int, random: np.random.Generator) -> list[Lengths]:
        """Look-alikes; prompt and output together are at most ``limit`` tokens long."""
        prompts = self.prompt.draw(count, limit // 2, random)
        outputs = self.output.draw(count, limit // 2, random)
        return [Lengths(*pair) for pair in zip(prompts.tolist(), outputs.tolist(), strict=True)]

    def draw_from(
        self, folder: Path, count: int, limit: int, random: np.random.Generator
    ) -> list[Lengths]:
        """Requests of the trace, none twice; longer ones than ``limit`` tokens are left out.

        Raises:
            SettingsError: the trace is not there, cannot be read, or is too short.
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
        LogNormal(19.31, 0.52),
        LogNormal(58.45, 1.2),
    ),
    Dataset(
        "sharegpt",
        "sharegpt_opt_lengths_le2048.csv.gz",
        LogNormal(161.31, 1.5),
        LogNormal(337.99, 1.15),
    ),
)


def read_lengths(path: Path) -> list[Lengths]:
    """All requests of a trace: gzipped CSV with ``prompt_tokens`` and ``output_tokens``.

    Rows without a prompt or without an output are left out.

    Raises:
        SettingsError: names the file and what is wrong with it.
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
