"""A pytest plugin that selects only the tests that are skipped without a GPU.

python -m pytest -p benchmarks.gpu.pytest_gpu_only tests
"""

import pytest

_REASON = "needs a GPU"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that run anywhere."""
    wanted = [item for item in items if _needs_gpu(item)]
    config.hook.pytest_deselected(items=[item for item in items if not _needs_gpu(item)])
    items[:] = wanted


def _needs_gpu(item: pytest.Item) -> bool:
    return any(mark.kwargs.get("reason") == _REASON for mark in item.iter_markers("skipif"))
