"""Send the batches of a loader worker to its parent.

torch serializes a batch in a thread of the worker. An error there is printed, the batch is lost,
and the parent waits for it forever (pytorch/pytorch#142884). So a worker serializes each batch
itself, where torch passes an error on to the parent, and the thread only sends bytes.
"""

import contextlib
import errno
import io
import os
import pickle
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

from trainbox.errors import (
    Failure,
    StorageFailure,
    WrongUse,
    called_exit,
    raised_interrupt,
    text_of,
)
from trainbox.folders.write_failures import too_many_files
from trainbox.tensor_trees import tensors_in

_SHM = "/dev/shm"  # noqa: S108 - the system's name of it
_ENOUGH_FILES = 2**16
_SPARE_FILES = 8  # that a worker needs to pass on the files of its batches
_MOST_TENSORS = 8
_ALIGNED = 64
_LARGE_BYTES = 2**20


def raise_file_limit() -> None:
    """Raise the soft limit of open files towards the hard limit, as tensors are passed as files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def too_many_tensors() -> WrongUse:
    """Return the failure for a process that may not open another file, such as for a tensor."""
    return too_many_files(", use fewer tensors in a batch, or add --workers 0")


def failure_of_start(error: OSError) -> Failure | OSError:
    """Return the failure for an error at the start of loader workers, or the error itself."""
    if error.errno == errno.EMFILE:
        return too_many_tensors()
    if error.errno == errno.ENOSPC:
        return shared_memory_full()
    if error.errno in (errno.EROFS, errno.EACCES):
        return StorageFailure(
            f"the loader workers cannot write {_SHM} ({error.strerror}): mount it for writing, or "
            "add --workers 0"
        )
    return error


def shared_memory_full() -> StorageFailure:
    """Return the failure for a loader worker that has found shared memory full."""
    total = shutil.disk_usage(_SHM).total
    gib = -(-2 * total // 2**30)
    return StorageFailure(
        f"{_SHM} ({total // 2**20} MiB) is too small for the batches of the loader workers: start "
        f"the container with --shm-size={gib}g (Compose: SHM_SIZE={gib}gb) or --ipc=host, or add "
        "--workers 0"
    )


@dataclass(frozen=True)
class _Position:
    """A tensor in a block of shared memory, instead of a file of its own."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def of(self, block: Tensor) -> Tensor:
        """Return the tensor, which keeps the block in memory."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")
        start, strides = self.offset // self.dtype.itemsize, torch.empty(self.shape, device="meta")
        return empty.set_(block.untyped_storage(), start, self.shape, strides.stride())


@dataclass(frozen=True)
class Sent:
    """The bytes of a batch. Its tensors are in shared memory."""

    content: bytes

    def received(self) -> Any:
        """Return the batch, in the parent.

        Raises:
            RuntimeError: The worker has died, or torch cannot map the shared memory.
            WrongUse: The batch has an object that cannot be made again, or too many files are open.
        """
        try:
            block, batch = pickle.loads(self.content)  # noqa: S301 - of a worker of this process
            return _Unpickler(batch, block).load()
        except (OSError, EOFError) as error:
            if getattr(error, "errno", None) == errno.EMFILE:
                raise too_many_tensors() from error
            raise RuntimeError("DataLoader worker exited unexpectedly") from error
        except RuntimeError:
            raise
        except Exception as error:
            raise _cannot_be_sent(error) from error


def sent(batch: Any) -> Sent:
    """Return the batch for the parent of this worker. Many tensors are put into one block.

    Raises:
        WrongUse: An object of the batch cannot be sent, or too many files are open.
        StorageFailure: The worker cannot make a socket.
        RuntimeError: Shared memory is full.
    """
    try:
        tensors = tensors_in(
            batch
        )  # kept until the end, so that no other tensor gets an id of theirs
        positions, block = _in_a_block(tensors)
        text = io.BytesIO()
        _Pickler(text, positions).dump(batch)
        del tensors
        content = bytes(ForkingPickler.dumps((block, text.getvalue())))
        # The thread that passes on the files would wait for a file forever.
        for spare in [os.dup(2) for _ in range(_SPARE_FILES)]:
            os.close(spare)
        return Sent(content)
    except OSError as error:
        if error.errno == errno.EMFILE:
            raise too_many_tensors() from error
        raise StorageFailure(
            "the loader workers cannot make a socket in the folder for temporary files "
            f"(TMPDIR={os.environ.get('TMPDIR', '')!r}: {error}): set TMPDIR to a folder with a "
            "short path that you can write to, or add --workers 0"
        ) from error
    except Exception as error:
        if "shared memory" in str(error):
            raise
        raise _cannot_be_sent(error) from error


def _cannot_be_sent(error: Exception) -> WrongUse:
    reason = " ".join(str(error).split())
    return WrongUse(
        f"a loader worker cannot send its batch ({type(error).__name__}: {reason[:200]}): return "
        "only tensors without a gradient, numbers and texts from the dataset and collate(), or "
        "add --workers 0"
    )


@contextlib.contextmanager
def errors_to_send() -> Iterator[None]:
    """Raise what a task raises in the body in a form that a worker can send to its parent.

    Raises:
        Failure: The task called sys.exit, or raised KeyboardInterrupt.
        RuntimeError: The parent could not make the task's error again.
    """
    try:
        yield
    except SystemExit as end:
        raise called_exit(end) from end
    except KeyboardInterrupt as interrupt:
        raise raised_interrupt(interrupt) from interrupt
    except BaseException as error:
        if not _can_be_made_again(error):
            raise RuntimeError(f"{type(error).__name__}: {text_of(error)}") from None
        raise


def _can_be_made_again(error: BaseException) -> bool:
    """Return whether the parent can make the error from its class and a text, as torch does."""
    # A class in a function has no name by which the parent can find it.
    if not isinstance(error, Exception) or "<locals>" in type(error).__qualname__:
        return False
    if isinstance(error, Failure | OSError):
        return True
    try:
        return isinstance(str(error), str) and isinstance(str(type(error)("text")), str)
    except Exception:  # noqa: BLE001 - of the task's class
        return False


def _in_a_block(tensors: list[Tensor]) -> tuple[dict[int, _Position], Tensor | None]:
    """Return the positions of tensors in a block by their ids, and the block in shared memory.

    Large tensors that are in shared memory stay there.
    """
    moved = [
        tensor
        for tensor in tensors
        if type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.requires_grad)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.is_contiguous()
        and not (tensor.nbytes >= _LARGE_BYTES and tensor.is_shared())
    ]
    if len(moved) <= _MOST_TENSORS:
        return {}, None
    positions, size = dict[int, _Position](), 0
    for tensor in moved:
        positions[id(tensor)] = _Position(size, tuple(tensor.shape), tensor.dtype)
        size += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    block = torch.empty(size, dtype=torch.uint8).share_memory_()
    for tensor in moved:
        positions[id(tensor)].of(block).copy_(tensor)
    return positions, block


class _Pickler(ForkingPickler):
    def __init__(self, file: io.BytesIO, positions: dict[int, _Position]) -> None:
        super().__init__(file)
        self._positions = positions

    def persistent_id(self, value: Any) -> _Position | None:
        return self._positions.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        # torch sends the memory of a conjugated or negated view without saying that it is one.
        if isinstance(value, Tensor) and (value.is_conj() or value.is_neg()):
            return _same, (value.resolve_conj().resolve_neg(),)
        return NotImplemented


def _same(value: Any) -> Any:
    return value


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, block: Tensor) -> None:
        super().__init__(io.BytesIO(content))
        self._block = block

    def persistent_load(self, position: _Position) -> Tensor:
        return position.of(self._block)
