"""Record work on a GPU as CUDA graphs, and replay them.

No other file uses torch.cuda.graph.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from trainer.parallel.world import World

T = TypeVar("T")


def can_record(device: torch.device) -> bool:
    """Return whether work on `device` can be recorded."""
    return device.type == "cuda"


class Recorder:
    """Records the graphs of one job, which share one pool of memory, on a stream of their own.

    The earlier eager steps must run on the same stream, because torch keeps the stream of a
    gradient's first computation (pytorch #180090). Each job has its own stream, because all graphs
    of a stream share the workspaces of cuBLAS (pytorch #193402).
    """

    def __init__(self, world: World) -> None:
        """Record on the device of `world`. From now on, this thread computes on a new stream."""
        self._world = world
        torch.cuda.synchronize(world.device)
        self._stream = torch.cuda.Stream(world.device)
        world.compute_on(self._stream)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Record `work` without computing it; return its result and a function that computes it.

        The tensors of the result have no values before the first call of the function. Each call
        reads and writes the same memory. Each call draws its random numbers from the GPU's
        generator.

        Raises:
            Exception: `work` cannot be recorded, for example because it waits for the GPU.
        """
        graph, device = torch.cuda.CUDAGraph(), self._world.device
        generator = torch.cuda.default_generators[device.index or 0]
        before = generator.clone_state()
        # Wait here for work that needs another process: GpuWatch, which has a time limit for such a
        # wait, pauses during the recording.
        torch.cuda.synchronize(device)
        # Other threads may allocate meanwhile, as the threads of loaders and checkpoints do
        # (pytorch #175425). The garbage collector must not free a tensor in the recording.
        try:
            with (
                self._world.recording(),
                _no_collections(),
                torch.cuda.graph(
                    graph, self._pool, self._stream, capture_error_mode="thread_local"
                ),
            ):
                result = work()
        except BaseException:
            # The generator may still be in the state of the recording. Put back its earlier state,
            # because the eager step draws the numbers of this seed.
            generator.graphsafe_set_state(before)
            raise
        return result, graph.replay


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
