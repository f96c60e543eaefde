"""Is an answer cut at its first stop string, wherever tokens and characters are split?"""

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.generate.stops import StopWatch, cut

TEXT = st.text(alphabet="ab é東🙂", max_size=12)


class Pieces:
    """A toy tokenizer: token n stands for the n-th piece of some bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.pieces[i] for i in ids).decode("utf-8", errors="replace")


@given(
    text=TEXT,
    sizes=st.lists(st.integers(1, 5), min_size=1),
    stop=st.lists(st.text(alphabet="ab é東🙂", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example(text="é🙂東🙂", sizes=[3, 1], stop=["東🙂"])  # every token ends inside a character
@settings(max_examples=400, deadline=None)
def test_a_stop_string_is_seen_with_the_token_that_completes_it(
    text: str, sizes: list[int], stop: list[str]
) -> None:
    data, pieces = text.encode(), []
    while data:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[:size])
        data = data[size:]
    toy = Pieces(pieces)
    watch = StopWatch(toy.decode, stop)
    for token in range(len(pieces)):
        seen = watch.push(token)
        assert seen == cut(toy.decode(range(token + 1)), stop)[1]
        if seen:
            break


def test_bytes_that_never_become_a_character_do_not_hide_what_follows() -> None:
    toy = Pieces([b"\xff"] * 50 + [b"S", b"T"])
    watch = StopWatch(toy.decode, ["ST"])
    seen = [watch.push(token) for token in range(52)]
    assert seen == [False] * 51 + [True]


def test_the_earliest_stop_string_wins() -> None:
    assert cut("one two three", ("three", "two", "zero")) == ("one ", True)
    assert cut("one", ("two",)) == ("one", False)
    assert cut("one", ()) == ("one", False)
