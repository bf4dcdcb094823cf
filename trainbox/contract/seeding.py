"""Seeds that are computed from their purpose, so no random state has to be saved."""

import hashlib


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that depends on each part, as in `derive_seed(seed, "order", epoch)`.

    The seed is the same on every machine.
    """
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
