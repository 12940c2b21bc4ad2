"""What tensor parallelism would make of a model on GPUs that NVLink connects: on paper.

    python -m benchmarks.simulator.nvlink [--model Llama-3-70B ...] [--gpus 1 2 4 8]

Nothing here was measured on GPUs. The worker model of the simulator estimates steps with embeddings
and output layer on every GPU and sums in float32, as the worker has them; the sums by the constants
of ``worker/all_reduce.py``, each by the faster of one shot and NCCL's ring.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.simulator.system import Work
from benchmarks.simulator.worker.all_reduce import AllReduce, one_shot, ring
from benchmarks.simulator.worker.hardware import GPUS, Gpu, find_gpu
from benchmarks.simulator.worker.model_shapes import MODELS, Model, find_model
from benchmarks.simulator.worker.worker_model import (
    CALIBRATIONS,
    MODERN,
    Calibration,
    Sums,
    WorkerModel,
    find_calibration,
)
from shared.errors import SettingsError

_BLOCK_SIZE = 16
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Estimate:
    """A step on paper.

    Attributes:
        num_tokens: that it computes.
        step_s: of all of it, with the faster sums.
        ring_s: of its sums by NCCL's ring.
        one_shot_s: of its sums in one shot.
    """

    num_tokens: int
    step_s: float
    ring_s: float
    one_shot_s: float

    @property
    def sums_share(self) -> float:
        """The share of the step in the faster sums."""
        return min(self.ring_s, self.one_shot_s) / self.step_s


class SplitModel:
    """A model on a tensor parallel group of equal GPUs.

    Args:
        model: to compute.
        gpu: to compute on.
        num_gpus: in the group.
        calibration: for what is not in data sheets, sums excepted.

    Raises:
        ValueError: KV heads cannot be shared evenly.
    """

    def __init__(self, model: Model, gpu: Gpu, num_gpus: int, calibration: Calibration) -> None:
        def worker(sums: AllReduce) -> WorkerModel:
            split = Sums(sums, _FLOAT32_BYTES, copies_vocabulary=True)
            return WorkerModel(model, gpu, num_gpus, calibration, sums=split)

        self._without_sums = worker(AllReduce(0.0, 0.0))
        self._ring, self._one_shot = worker(ring(num_gpus)), worker(one_shot(num_gpus))

    @property
    def num_blocks(self) -> int:
        """KV blocks that fit beside the weights.

        Raises:
            ValueError: not even the weights fit.
        """
        return self._ring.kv_slots // _BLOCK_SIZE

    def decode(self, num_seqs: int, context: int) -> Estimate:
        """A step that decodes a token of each sequence, with so many tokens before it."""
        pairs = num_seqs * context
        work = Work(decode_tokens=num_seqs, decode_context=pairs, sampled_rows=num_seqs)
        return self._estimate(work, num_seqs)

    def prompt(self, num_tokens: int) -> Estimate:
        """A step that computes a prompt."""
        pairs = num_tokens * (num_tokens + 1) // 2
        work = Work(prefill_tokens=num_tokens, prefill_context=pairs, sampled_rows=1)
        return self._estimate(work, num_tokens)

    def _estimate(self, work: Work, num_tokens: int) -> Estimate:
        without_s = self._without_sums.seconds(work)
        ring_s, one_shot_s = (
            worker.seconds(work) - without_s for worker in (self._ring, self._one_shot)
        )
        return Estimate(num_tokens, without_s + min(ring_s, one_shot_s), ring_s, one_shot_s)


def rows(
    model: Model,
    gpu: Gpu,
    groups: Sequence[int],
    batches: Sequence[int],
    context: int,
    prompt: int,
    calibration: Calibration,
) -> list[list[str]]:
    """Rows of the table: a group of GPUs and a case each."""
    found = []
    for num_gpus in groups:
        split = SplitModel(model, gpu, num_gpus, calibration)
        try:
            num_blocks = split.num_blocks
        except ValueError:
            found.append([model.name, str(num_gpus), "does not fit"])
            continue
        cases = [(f"decode, {size}", split.decode(size, context)) for size in batches]
        cases.append((f"prompt, {prompt:,}", split.prompt(prompt)))
        needed = [size * -(-context // _BLOCK_SIZE) for size in batches]
        needed.append(-(-prompt // _BLOCK_SIZE))
        for (case, estimate), blocks in zip(cases, needed, strict=True):
            name = case if blocks <= num_blocks else f"{case} (too many blocks)"
            found.append([model.name, str(num_gpus), name, *_cells(estimate), f"{num_blocks:,}"])
    return found


def _cells(estimate: Estimate) -> list[str]:
    return [
        f"{1e3 * estimate.step_s:.1f}",
        f"{estimate.num_tokens / estimate.step_s:,.0f}",
        f"{1e3 * estimate.ring_s:.2f}",
        f"{1e3 * estimate.one_shot_s:.2f}",
        f"{estimate.sums_share:.0%}",
    ]


def main() -> int:
    """Print the table."""
    args = _parsed()
    try:
        gpu, calibration = find_gpu(args.gpu), find_calibration(args.calibration)
        models = [find_model(name) for name in args.model]
        found = [
            row
            for model in models
            for row in rows(
                model, gpu, args.gpus, args.batches, args.context, args.prompt, calibration
            )
        ]
    except (SettingsError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"On paper, {gpu.name}: decodes behind {args.context:,} tokens each.")
    print("| model | GPUs | step | ms | tokens/s | ring ms | one shot ms | sums | blocks |")
    print("|---|---:|---|" + "---:|" * 6)
    for row in found:
        print(f"| {' | '.join(row)} |")
    return 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        nargs="+",
        default=["Llama-3-8B", "Llama-3-70B"],
        help=f"of {', '.join(model.name for model in MODELS)}",
    )
    parser.add_argument("--gpu", default="H100", help=f"of {', '.join(g.name for g in GPUS)}")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8], help="in a group")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256], help="sequences")
    parser.add_argument("--context", type=int, default=1_024, help="tokens before each decode")
    parser.add_argument("--prompt", type=int, default=2_048, help="tokens of a prompt")
    parser.add_argument(
        "--calibration", default=MODERN, help=f"fixed costs, of {', '.join(CALIBRATIONS)}"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
