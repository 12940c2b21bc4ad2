"""Traces in all their formats are read, or refused with file, line and value."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulator.system import SimRequest
from benchmarks.simulator.traces import (
    TraceError,
    has_arrivals,
    read_trace,
    sped_up,
    with_poisson_arrivals,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:51.2224670,879,0
"""
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
"""
OURS = "arrival_s,prompt_tokens,output_tokens\n1.5,7,3\n0.5,9,2\n"
WITHOUT_ARRIVALS = "arrival_s,prompt_tokens,output_tokens\n,7,3\n,9,2\n"
MOONCAKE = "\n".join(
    json.dumps({"timestamp": ms, "input_length": 700, "output_length": 5, "hash_ids": ids})
    for ms, ids in ((27, [46, 47]), (3_027, [46, 57]))
)


def read(tmp_path: Path, text: str) -> list[SimRequest]:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path)


def numbers(requests: list[SimRequest]) -> list[tuple[float, int, int]]:
    return [
        (round(found.arrival_s, 6), found.prompt_tokens, found.output_tokens) for found in requests
    ]


def test_azures_moments_become_seconds_and_failed_requests_are_left_out(tmp_path: Path) -> None:
    assert numbers(read(tmp_path, AZURE)) == [(0, 374, 44), (4.314579, 396, 109)]


def test_azures_moments_may_have_a_zone(tmp_path: Path) -> None:
    zoned = AZURE.replace("50.9951690", "50.9951690+00:00")
    assert numbers(read(tmp_path, zoned)) == numbers(read(tmp_path, AZURE))


def test_burst_gpt_is_read_from_its_first_request_on(tmp_path: Path) -> None:
    assert numbers(read(tmp_path, BURST)) == [(0, 472, 18), (40, 1087, 230)]


def test_our_own_is_sorted_by_arrival_and_numbered(tmp_path: Path) -> None:
    found = read(tmp_path, OURS)
    assert numbers(found) == [(0, 9, 2), (1, 7, 3)]
    assert [request.id for request in found] == [0, 1]


def test_a_compressed_trace_is_recognized_by_its_content(tmp_path: Path) -> None:
    (tmp_path / "packed").write_bytes(gzip.compress(OURS.encode()))
    assert read_trace(tmp_path / "packed") == read(tmp_path, OURS)


def test_mooncakes_hashes_name_shared_content(tmp_path: Path) -> None:
    first, second = read(tmp_path, MOONCAKE)
    assert (first.prefix, second.prefix) == ((46, 47), (46, 57))
    assert first.prefix_block_tokens == 512
    assert second.arrival_s == 3.0


def test_a_trace_without_arrivals_gets_them_at_random_by_seed(tmp_path: Path) -> None:
    found = read(tmp_path, WITHOUT_ARRIVALS)
    assert not has_arrivals(found)

    def arrivals(seed: int) -> list[float]:
        drawn = with_poisson_arrivals(found * 5_000, 4.0, np.random.default_rng(seed))
        return [request.arrival_s for request in drawn]

    gaps = np.diff(arrivals(1))
    assert arrivals(1) == arrivals(1) != arrivals(2)
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 4, rel=0.03)


def test_a_trace_can_be_played_faster(tmp_path: Path) -> None:
    found = read(tmp_path, OURS)
    assert [request.arrival_s for request in sped_up(found, 4)] == [0, 0.25]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace: it is empty"),
        ("a,b\n1,2\n", r"line 1: columns a, b; expected are TIMESTAMP, .* or prompt_tokens"),
        (AZURE.replace("396", "many"), r"line 3: ContextTokens='many' is no number of tokens"),
        (AZURE.replace(",109", ""), r"line 3: GeneratedTokens=None is no number of tokens"),
        (AZURE.replace("2023-11-16 18:15:50.9951690", "noon"), r"line 3: TIMESTAMP='noon' is no"),
        (BURST.replace("45,", "inf,"), r"line 3: Timestamp='inf' is no time in seconds"),
        (OURS.replace("9,2", "9,-2"), r"line 3: output_tokens='-2' is no number of tokens"),
        (OURS.replace("9,2", "9,2.5"), r"line 3: output_tokens='2.5' is no number of tokens"),
        (OURS.replace("0.5", "-1"), r"line 3: arrival_s='-1' is no time in seconds"),
        ("prompt_tokens,output_tokens\n0,0\n", "it has no request with a prompt and an output"),
        (MOONCAKE + "\n{oops", r"line 3: '\{oops' is no JSON"),
        (MOONCAKE + "\n[1, 2]", r"line 3: '\[1, 2\]' is no object"),
        (MOONCAKE.replace("700", '"x"'), r"line 1: input_length='x' is no whole number"),
        (MOONCAKE.replace("[46, 57]", "[46, 5.5]"), r"line 2: hash_ids=\[46, 5\.5\] are no list"),
    ],
)
def test_what_cannot_be_read_is_named_with_line_and_value(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read(tmp_path, text)


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere"):
        read_trace(tmp_path / "nowhere")
    (tmp_path / "half").write_bytes(gzip.compress(OURS.encode() * 100)[:-20])
    with pytest.raises(TraceError, match="half"):
        read_trace(tmp_path / "half")
