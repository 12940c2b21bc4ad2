"""Lengths of requests: look-alikes have the published means, traces are read or refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulator.lengths import DATASETS, Dataset, Lengths, Mixture, Part, read_lengths
from shared.errors import SettingsError

LIMIT = 2_048
PARTS = (Part(1.0, 5.0, 1.0),)


def write(path: Path, text: str) -> Path:
    with gzip.open(path, "wt") as file:
        file.write(text)
    return path


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """Ten requests of up to 10 + 40 tokens."""
    rows = [f",{number},{4 * number}" for number in range(1, 11)]
    write(tmp_path / "trace.csv.gz", "\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]))
    return Dataset("some", "trace.csv.gz", Mixture(5.0, PARTS), Mixture(20.0, PARTS))


@pytest.mark.parametrize("published", DATASETS, ids=lambda dataset: dataset.name)
def test_look_alikes_have_the_published_means(published: Dataset) -> None:
    drawn = published.draw(100_000, LIMIT, np.random.default_rng(0))
    assert np.mean([each.prompt for each in drawn]) == pytest.approx(
        published.prompt.mean, rel=0.03
    )
    assert np.mean([each.output for each in drawn]) == pytest.approx(
        published.output.mean, rel=0.03
    )


@pytest.mark.parametrize("published", DATASETS, ids=lambda dataset: dataset.name)
def test_look_alikes_fit_the_context_and_are_never_empty(published: Dataset) -> None:
    for each in published.draw(20_000, LIMIT, np.random.default_rng(0)):
        assert each.prompt >= 1
        assert each.output >= 1
        assert each.prompt + each.output <= LIMIT


def test_the_same_seed_draws_the_same_requests(dataset: Dataset, tmp_path: Path) -> None:
    def draw(seed: int) -> tuple[list[Lengths], list[Lengths]]:
        random = np.random.default_rng(seed)
        return dataset.draw(8, LIMIT, random), dataset.draw_from(tmp_path, 8, LIMIT, random)

    assert draw(3) == draw(3)
    assert draw(3)[0] != draw(4)[0]
    assert draw(3)[1] != draw(4)[1]


def test_no_request_of_a_trace_is_drawn_twice(dataset: Dataset, tmp_path: Path) -> None:
    drawn = dataset.draw_from(tmp_path, 10, LIMIT, np.random.default_rng(0))
    assert sorted(each.prompt for each in drawn) == list(range(1, 11))


def test_requests_that_do_not_fit_are_left_out(dataset: Dataset, tmp_path: Path) -> None:
    drawn = dataset.draw_from(tmp_path, 4, 20, np.random.default_rng(0))
    assert sorted(each.prompt for each in drawn) == [1, 2, 3, 4]
    with pytest.raises(SettingsError, match=r"trace\.csv\.gz has 4 requests that fit, 5 are"):
        dataset.draw_from(tmp_path, 5, 20, np.random.default_rng(0))


def test_rows_without_output_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "trace", "prompt_tokens,output_tokens\n7,0\n0,3\n5,2\n")
    assert read_lengths(path) == [Lengths(5, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt_tokens\n7\n", "trace has no column 'output_tokens'"),
        ("prompt_tokens,output_tokens\n7,many\n", "no whole number: .*'many'"),
        ("prompt_tokens,output_tokens\n7\n", "no whole number"),
    ],
)
def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_lengths(write(tmp_path / "trace", text))


def test_a_trace_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="nowhere"):
        read_lengths(tmp_path / "nowhere")
    (tmp_path / "plain").write_text("prompt_tokens,output_tokens\n1,2\n")
    with pytest.raises(SettingsError, match="plain"):
        read_lengths(tmp_path / "plain")
    whole = gzip.compress(b"prompt_tokens,output_tokens\n1,2\n")
    (tmp_path / "half").write_bytes(whole[:-12])
    with pytest.raises(SettingsError, match="half"):
        read_lengths(tmp_path / "half")
