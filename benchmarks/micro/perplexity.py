"""Perplexity of a model on a text, by the format of its weights.

    python -m benchmarks.micro.perplexity --model models/demo --text FILE [--formats none,int8,int4]

The text is cut into windows, each of which is computed alone, by the layers that would serve the
model on this CPU. Tokens of a window are predicted from those before them in it.
"""

import argparse
import gzip
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from benchmarks.models.model_folder import MODEL_HELP, model_folder
from gpu_worker.model.fusion.cpu_fusion import fuse
from gpu_worker.model.loader import load_model
from gpu_worker.model.quantization.requested_format import FORMATS
from gpu_worker.model.ragged_model import RaggedModel
from gpu_worker.settings import WorkerSettings
from kernels.cpu.linear.layers import CpuLayers
from kernels.cpu.runtime.instruction_set import detect

AS_STORED = "auto"
"""The format of a checkpoint's own weights."""

_CPU = torch.device("cpu")


def served_model(folder: str, form: str | None, dtype: str | None) -> RaggedModel:
    """The model with the layers that serve it on this CPU."""
    quantization = None if form == AS_STORED else form
    settings = WorkerSettings(model=folder, quantization=quantization, dtype=dtype)
    model = load_model(settings, _CPU)
    instructions = detect()
    if instructions is not None:
        fuse(model.model, CpuLayers(instructions), model.dtype)
    return model


@torch.inference_mode()
def perplexity(
    model: RaggedModel,
    tokens: torch.Tensor,  # [T] int64
    window: int,
) -> float:
    """Of all tokens but the first of each window."""
    total, count = 0.0, 0
    for begin in range(0, len(tokens), window):
        part = tokens[begin : begin + window]
        if len(part) > 1:
            logits = model.eager_logits(part)[:-1].float()
            total += float(cross_entropy(logits, part[1:], reduction="sum"))
            count += len(part) - 1
    return math.exp(total / count)


def measure(
    folder: str, text: str, formats: Sequence[str], dtype: str | None, window: int, limit: int
) -> dict[str, dict[str, float]]:
    """Perplexity and memory of weights by format."""
    found = {}
    for form in formats:
        model = served_model(folder, form, dtype)
        tokens = torch.tensor(AutoTokenizer.from_pretrained(folder).encode(text)[:limit])
        found[form] = {"tokens": len(tokens), "perplexity": perplexity(model, tokens, window)}
        print(f"{form}: {found[form]}", file=sys.stderr)
    return found


def main() -> None:
    """Measure and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=model_folder, required=True, help=MODEL_HELP)
    parser.add_argument("--text", type=Path, required=True, help="UTF-8, may be compressed (.gz)")
    formats = f"of {', '.join(FORMATS)} and {AS_STORED}; the first is the reference"
    parser.add_argument("--formats", default=",".join(FORMATS), help=formats)
    parser.add_argument("--dtype", help="of everything else; by default as the worker chooses")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--limit", type=int, default=30_000, help="tokens of the text, at most")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    read = gzip.open if args.text.suffix == ".gz" else open
    with read(args.text, "rt", encoding="utf-8") as file:
        text = file.read()
    formats = args.formats.split(",")
    found = measure(args.model, text, formats, args.dtype, args.window, args.limit)
    if args.json:
        print(json.dumps(found))
        return
    reference = found[formats[0]]["perplexity"]
    for form, values in found.items():
        change = 100 * (values["perplexity"] / reference - 1)
        print(f"{form:<8}{values['perplexity']:>10.4f}{change:>+8.2f} %")


if __name__ == "__main__":
    main()
