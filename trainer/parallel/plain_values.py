"""The values that ranks exchange are JSON and never run code of another rank."""

import json
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from trainbox.errors import NetworkFailure, WrongUse
from trainbox.files.parsing import parse_json

_LONGEST_VALUE = 2**24  # bytes of JSON: settings, metrics and short texts
_SAME_VERSION = "start the same version of Trainbox on each machine"


def packed(value: Any) -> Tensor:
    """Return `value` as bytes (N,) of JSON.

    Torch's object collectives would unpickle, which runs code that a peer chooses. Python's JSON
    preserves the bits of floats. It also preserves NaN and infinities, which a metric may be.
    """
    text = json.dumps(value)
    assert repr(json.loads(text)) == repr(value), (
        f"JSON would change {value!r}: use lists and names of type str"
    )
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def unpacked(packed_N: Tensor) -> Any:
    """Return the value that another rank has packed.

    Raises:
        NetworkFailure: The bytes are not JSON.
    """
    try:
        return parse_json(packed_N.numpy().tobytes())
    except ValueError as error:
        raise NetworkFailure(
            f"another process sent bytes that are not JSON: {_SAME_VERSION}"
        ) from error


def checked_size(size: int) -> int:
    """Return `size`.

    Raises:
        NetworkFailure: No value of this version has that many bytes.
    """
    if not 0 < size <= _LONGEST_VALUE:
        raise NetworkFailure(
            f"another process announced {size} bytes instead of 1 to {_LONGEST_VALUE}: "
            f"{_SAME_VERSION}"
        )
    return size


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler of numbers, texts and containers that refuses names, which would run code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise WrongUse(
            "a collective of torch.distributed received an object of "
            f"{module_name}.{global_name} from another machine, and unpickling an object runs "
            "code: exchange tensors or plain values"
        )


def refuse_foreign_objects() -> None:
    """Make torch's object collectives accept plain values only.

    A task or torch.compile may call these collectives.
    """
    distributed_c10d._unpickler = _PlainUnpickler
