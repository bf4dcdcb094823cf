"""Seeds computed from what they are for, never drawn: nothing of the random state has to be
saved.
"""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on each part: `derive_seed(seed, "order", epoch)`.

    The same on every machine.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
