"""Benchmarks take models as scripts/serve does."""

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.micro.cpu_linear import choose_source, compare_steps, layers_of
from benchmarks.models.model_folder import model_folder
from deploy.settings import REPOSITORY
from tests.support.models import tiny_model


def test_a_name_is_its_folder_and_a_misspelt_one_is_refused() -> None:
    assert model_folder("demo") == str(REPOSITORY / "models" / "demo")
    with pytest.raises(argparse.ArgumentTypeError, match="did you mean smollm2"):
        model_folder("smolm2")


def test_linear_layers_have_the_sizes_of_the_given_model() -> None:
    layers = layers_of(choose_source("162m", str(REPOSITORY / "models" / "demo")).config)
    sizes = [(layer.in_features, layer.out_features) for layer in layers]
    assert sizes == [(256, 512), (256, 256), (256, 1_408), (704, 256), (256, 4_096)]


def test_decode_steps_of_a_given_model_are_timed_with_compiled_layers_and_without() -> None:
    source = choose_source("162m", str(REPOSITORY / "models" / "demo"))
    found = compare_steps(source, torch.float32, [2])
    assert found[2].keys() == {"on", "off"}
    assert min(found[2].values()) > 0


def test_a_model_of_another_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its type is opt, not llama"):
        choose_source("162m", str(tiny_model("opt", tmp_path)))
