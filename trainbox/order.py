"""Seeds, and the order of the examples in an epoch: pure functions, so no state is saved."""

import hashlib
import operator

from trainbox.errors import WrongUse


def epoch_order(seed: int, epoch: int, n: int) -> list[int]:
    """Return the order of `n` examples in `epoch`: the numbers 0 to n - 1, shuffled.

    The order depends only on the arguments. It is the same on each machine and with each version of
    Python, torch and NumPy, because NumPy does not change the numbers of `RandomState`. It is not
    the order of `trainbox train`, which is torch's.

    Raises:
        WrongUse: `n` is negative.
    """
    if (n := operator.index(n)) < 0:
        raise WrongUse(f"n={n} is not a number of examples: give 0 or more")
    from numpy.random import RandomState

    value = derive_seed(operator.index(seed), "order", operator.index(epoch))
    order: list[int] = RandomState([value % 2**32, value >> 32]).permutation(n).tolist()
    return order


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on each part, as in `derive_seed(seed, "order", epoch)`.

    The seed is the same on every machine.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
