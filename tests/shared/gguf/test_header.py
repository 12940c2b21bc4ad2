"""Headers of GGUF files: read as the ``gguf`` package writes them, refused when damaged."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from shared.errors import ModelUnsupported
from shared.gguf.header import read_header

TOKENS = ["a", "\N{LATIN SMALL LETTER E WITH ACUTE}", ""]


def written(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_float32("llama.rope.freq_base", 10_000.0)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0, -1.5, -2.0])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", gguf.quantize(np.ones((2, 64), np.float32), Q8_0), raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Q8_0 = gguf.GGMLQuantizationType.Q8_0


def test_metadata_and_places_of_tensors_are_those_that_were_written(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf")
    header = read_header(path)
    assert header.architecture == "llama"
    assert header.of_model("context_length") == 512
    assert header.of_model("rope.freq_base") == 10_000.0
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    assert header.metadata["tokenizer.ggml.tokens"] == TOKENS
    assert header.metadata["tokenizer.ggml.scores"].tolist() == [0.0, -1.5, -2.0]
    first, second = header.tensors["first"], header.tensors["second"]
    assert (first.shape, second.shape, second.type_id) == ((2, 3), (2, 64), Q8_0.value)
    data = path.read_bytes()
    assert np.frombuffer(data[first.offset :], "<f4", 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert len(data) >= second.offset + 2 * 68


def test_a_file_that_ends_within_its_header_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf")
    data = path.read_bytes()
    begin = min(tensor.offset for tensor in read_header(path).tensors.values())
    for length in range(begin - 32):
        path.write_bytes(data[:length])
        with pytest.raises(ModelUnsupported, match=r"no GGUF file|damaged or incomplete"):
            read_header(path)


def test_any_changed_byte_of_a_header_is_refused_or_read(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf")
    data = path.read_bytes()
    begin = min(tensor.offset for tensor in read_header(path).tensors.values())
    for at in range(begin):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            read_header(path)
        except ModelUnsupported:
            continue


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\3\4" + bytes(60), "does not begin with GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 of GGUF is not served"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "no general.architecture"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63), "damaged or incomplete"),
    ],
)
def test_what_is_wrong_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelUnsupported, match=message):
        read_header(path)


def test_a_part_of_a_model_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model-00001-of-00003.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelUnsupported, match=r"split\.count=3: it is one part of a model"):
        read_header(tmp_path / "model-00001-of-00003.gguf")
