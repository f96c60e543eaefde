"""How many tokens of each text of a pair have room? The longer text gives way first."""


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens to keep of a pair of `first` and `second` tokens, `room` together at most.

    As the tokenizers library cuts: the longer one down to the shorter, then both to a half, the
    odd token being the longer one's.
    """
    if first + second <= room:
        return first, second
    short, long = min(first, second), max(first, second)
    long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = room - short
    return (long, short) if first > second else (short, long)
