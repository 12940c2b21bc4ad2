"""The benchmark of sampling methods, on the demo model."""

from rich.console import Console

from benchmarks.micro.driven_worker import DrivenWorker
from benchmarks.micro.sampling import METHODS, measure, table
from deploy.settings import REPOSITORY
from gpu_worker.settings import WorkerSettings
from gpu_worker.startup.build import build_worker


def test_every_way_is_timed() -> None:
    model = str(REPOSITORY / "models" / "demo")
    worker = build_worker(WorkerSettings(model=model, device="cpu", num_blocks=32, num_threads=1))
    driven = DrivenWorker(worker.executor, 2, 512)
    found = measure(driven, worker.model.vocab_size, num_sequences=2, num_new=8, rounds=2)
    driven.close()
    assert found.keys() == METHODS.keys()
    for seconds in found.values():
        assert len(seconds) == 2 * 4  # of the seven decodes of a round two warm up, one is first
        assert min(seconds) > 0
    shown = Console(width=120, record=True)
    shown.print(table({2: found}))
    assert "(+0.0%)" in shown.export_text()
