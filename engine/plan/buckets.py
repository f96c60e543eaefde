"""Which lengths count as alike? Length buckets: 16 32 48 64 96 128 192 256 384 512 768 1024 …

A batch holds lengths of one bucket only, so at most about a third of it is padding.
"""

_FIRST = (16, 32, 48, 64)


def bucket_of(length: int) -> int:
    """The upper border of the bucket that holds `length` tokens; `length` ≥ 1."""
    return _borders(length)[1]


def bucket_floor(length: int) -> int:
    """The longest length that falls below the bucket of `length`; 0 for the first bucket."""
    return _borders(length)[0]


def _borders(length: int) -> tuple[int, int]:
    below = 0
    for border in _FIRST:
        if length <= border:
            return below, border
        below = border
    power = 64  # from here a power of two and one and a half of it, by turns
    while True:
        for border in (power * 3 // 2, power * 2):
            if length <= border:
                return below, border
            below = border
        power *= 2
