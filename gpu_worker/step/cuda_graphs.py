"""CUDA graphs: a forward pass is captured once per size and then launched as one graph."""

import time
from dataclasses import dataclass, replace

import torch

from gpu_worker.step.buckets import Bucket, Buckets
from gpu_worker.step.inputs import InputWriter, StepInputs
from gpu_worker.step.model_runner import StepRunner
from kernels.interface import RowArgmax
from shared.logs import EventLog

_PROGRESS_S = 2.0

log = EventLog(__name__)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph and the address of its inputs."""

    graph: torch.cuda.CUDAGraph
    token_ids: int  # address of the inputs' first field


class GraphRunner:
    """Replays the graph of a step's bucket; runs steps without a graph eagerly.

    All graphs share one memory pool, because two of them never run at the same time. Their logits
    are copied out of it.

    Args:
        eager: runs steps without a graph, and the steps that are captured.
        max_num_sequences: of a padded step.
        table_width: columns of the widest block tables.
        device: a GPU.
    """

    def __init__(
        self, eager: StepRunner, max_num_sequences: int, table_width: int, device: torch.device
    ) -> None:
        self._eager = eager
        self._num_rows = max_num_sequences
        self._graphs: dict[Bucket, _Captured] = {}
        self._logits = torch.empty(0)
        # A graph reads tables of one width; those of a step may be narrower.
        self._tables = torch.zeros(
            (max_num_sequences, table_width), dtype=torch.int32, device=device
        )
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, inputs: StepInputs) -> torch.Tensor:
        captured = None if inputs.bucket is None else self._graphs.get(inputs.bucket)
        if captured is None:
            return self._eager.run(inputs)
        assert inputs.token_ids.data_ptr() == captured.token_ids, inputs.bucket
        tables = inputs.batch.block_tables
        num_seqs, width = tables.shape
        self._tables[:num_seqs, :width].copy_(tables)
        captured.graph.replay()
        return self._logits[:num_seqs]

    def argmax(self, inputs: StepInputs) -> RowArgmax | torch.Tensor:
        return self.run(inputs)

    @torch.inference_mode()
    def capture(self, writer: InputWriter, buckets: Buckets) -> None:
        """Capture a graph for each size.

        Args:
            writer: of the inputs that graphs read.
            buckets: the sizes.

        Raises:
            RuntimeError: the model does something that cannot be captured.
        """
        began = logged = time.monotonic()
        sizes = list(buckets)
        before = torch.cuda.memory_reserved(self._tables.device)
        # A capture that fails leaves its stream current; this restores the one before.
        with torch.cuda.stream(torch.cuda.current_stream()):
            for done, bucket in enumerate(sizes):
                if time.monotonic() - logged > _PROGRESS_S:
                    logged = time.monotonic()
                    log.info("capturing CUDA graphs", done=done, of=len(sizes))
                self._capture(bucket, writer)
        log.info(
            "CUDA graphs captured",
            graphs=len(sizes),
            largest=sizes[0],
            bytes=torch.cuda.memory_reserved(self._tables.device) - before,
            seconds=round(time.monotonic() - began, 1),
        )

    def _capture(self, bucket: Bucket, writer: InputWriter) -> None:
        inputs = writer.padding(bucket)
        batch = replace(inputs.batch, block_tables=self._tables[: bucket.num_seqs])
        inputs = replace(inputs, batch=batch)
        logits = self._eager.run(inputs)  # compiles kernels, which a capture must not do
        if not len(self._logits):
            self._logits = logits.new_empty((self._num_rows, logits.shape[1]))
        del logits  # frees its memory for the graph
        graph = torch.cuda.CUDAGraph()
        # Other threads may call the driver meanwhile: one that maps blocks, and NCCL's watchdog.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self._eager.run(inputs)
            self._logits[: len(logits)].copy_(logits)
        self._graphs[bucket] = _Captured(graph, inputs.token_ids.data_ptr())
