"""Seeds as a function of what they are for."""

from __future__ import annotations

import hashlib
import threading

GENERATOR_LOCK = threading.RLock()
"""Held by whoever seeds the process's default random generator, until it is as it was.

Ranks may be threads of one process, which share that generator.
"""


def mixed_seed(*fields: int | str) -> int:
    """32 well mixed bits from a purpose, a user's seed and indices.

    The CPU generator keeps only the low 32 bits of a seed, so fields must be hashed, not packed.

    Example:
        >>> mixed_seed("layer", 0, 3) != mixed_seed("layer", 3, 0)
        True
    """
    text = " ".join(map(str, ("stretto", *fields)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
