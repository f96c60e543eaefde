"""Are guesses taken out of the text, longer while right, and rarer while wrong?"""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.generate.guesses import Guesses


def slowly(text: Sequence[int], most: int) -> tuple[int, ...]:
    """Look for the longest end of the text, of three tokens at most, that came before."""
    for length in (3, 2, 1):
        end = tuple(text[-length:])
        for begin in range(len(text) - 1, length - 1, -1):
            if tuple(text[begin - length : begin]) == end:
                followed = list(text[begin:])
                while len(followed) < most:
                    followed += text[begin:]
                return tuple(followed[:most])
    return ()


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=30)


@given(prompt=tokens, made=tokens, cuts=st.lists(st.integers(0, 30)), most=st.integers(1, 4))
def test_a_guess_is_what_followed_the_last_time(
    prompt: list[int], made: list[int], cuts: list[int], most: int
) -> None:
    guesses = Guesses(prompt)
    for cut in sorted(cuts):
        guesses.next(made[:cut], most)  # whatever it has read of the answer before
    assert guesses.next(made, most) == slowly([*prompt, *made], most)


def test_guesses_get_longer_while_they_are_right() -> None:
    guesses = Guesses([1, 2, 3] * 20)
    sizes = []
    for _ in range(4):
        guess = guesses.next([], 100)
        sizes.append(len(guess))
        guesses.learn(len(guess), len(guess), 0)
    assert sizes == [4, 8, 16, 16]
    guesses.learn(16, 5, 0)
    assert len(guesses.next([], 100)) == 6
    assert len(guesses.next([], 3)) == 3


def test_guesses_that_are_wrong_get_rarer_until_one_is_right() -> None:
    guesses = Guesses([7] * 10)
    made: list[int] = []
    tries = []
    while len(made) < 500:
        if guess := guesses.next(made, 4):
            tries.append(len(made))
            guesses.learn(len(guess), 0, len(made))
        made.append(7)
    apart = [later - sooner for sooner, later in pairwise(tries)]
    assert apart == [2, 4, 8, 16, 32, *[64] * (len(apart) - 5)]
    guesses.learn(4, 1, len(made))
    assert guesses.next([*made, 7] + [7] * 64, 4)
    guesses.learn(4, 0, len(made))
    assert guesses.next([*made, 7, 7, 7], 4)  # patient again
