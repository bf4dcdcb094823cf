"""The order of the examples in an epoch: a pure function of the seed and the epoch."""

import operator

from trainbox.contract.errors import WrongUse
from trainbox.contract.seeding import derive_seed


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
