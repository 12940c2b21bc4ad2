"""Makes transformers' tokenizer from the metadata of a GGUF file."""

import json
from typing import Any

import numpy as np

from shared.errors import ModelUnsupported
from shared.gguf.header import GgufHeader

_PREFIX = "tokenizer.ggml."
# By transformers' names of what its converter reads.
_FIELDS = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "precompiled_charsmap": "precompiled_charsmap",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
    "add_prefix_space": "add_space_prefix",
}
_NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def load_tokenizer(header: GgufHeader) -> Any:
    """The tokenizer of transformers, with the file's chat template; needs no torch.

    Raises:
        ModelUnsupported: transformers has no tokenizer of this kind, or the metadata are no
            tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    found = {
        name: _plain(header.metadata[_PREFIX + key])
        for name, key in _FIELDS.items()
        if _PREFIX + key in header.metadata
    }
    if "tokens" not in found:
        raise ModelUnsupported(f"{header.path}: its metadata has no tokenizer ({_PREFIX}tokens)")
    try:
        backend, more = _converted(header, found)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **more, **_options(header))
    except Exception as error:  # transformers and tokenizers raise many unrelated types
        kind = f"{_PREFIX}model={found.get('tokenizer_type')!r}"
        reason = f"no tokenizer can be made of its metadata ({kind}): {error}"
        raise ModelUnsupported(f"{header.path}: {reason}") from error


def _converted(header: GgufHeader, found: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The tokenizer of the tokenizers library, and options for that of transformers."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer
    except ImportError:  # where it was in versions of transformers before 5.20
        from transformers.integrations.ggml import convert_gguf_tokenizer
    backend, more = convert_gguf_tokenizer(header.architecture, found)
    if backend.get_vocab_size() > len(found["tokens"]):
        backend = _without_more_tokens(backend, len(found["tokens"]))
    return backend, dict(more)


def _without_more_tokens(backend: Any, size: int) -> Any:
    """The tokenizer without tokens that its class has added, and that the model does not have."""
    described = json.loads(backend.to_str())
    described["added_tokens"] = [each for each in described["added_tokens"] if each["id"] < size]
    return type(backend).from_str(json.dumps(described))


def _options(header: GgufHeader) -> dict[str, Any]:
    metadata = header.metadata
    tokens = metadata[_PREFIX + "tokens"]
    options: dict[str, Any] = {
        # llama.cpp begins texts of such vocabularies with this token unless a file forbids it.
        "add_bos_token": metadata.get(
            _PREFIX + "add_bos_token", metadata.get(_PREFIX + "model") == "llama"
        ),
        "add_eos_token": metadata.get(_PREFIX + "add_eos_token", False),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _NAMED_TOKENS.items():
        index = metadata.get(_PREFIX + key)
        if index is not None:
            options[name] = tokens[index]
    if "tokenizer.chat_template" in metadata:
        options["chat_template"] = metadata["tokenizer.chat_template"]
    return options


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value
