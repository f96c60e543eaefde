"""Which tokens will an answer go on with, if it goes on as its text has gone before?

Texts repeat themselves: an answer copies names out of its prompt, or says again what it said. A
guess costs nothing but its row of a step; where few sequences run, rows are nearly free. What a
guess gets wrong is thrown away, so answers are the same with any guesses. (Prompt lookup decoding.)
"""

from collections.abc import Sequence

_LONGEST = 3  # tokens of a context that are looked for, fewer where so many were not seen
_FIRST, _MOST = 4, 16  # tokens of a guess
_PATIENCE = 64  # tokens of an answer that wrong guesses are kept away from, at most


class Guesses:
    """Guesses at one answer; they get longer while they are right, and rarer while they are not."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # a context to where what followed it stands
        self._prompt = len(prompt)
        self._size = _FIRST
        self._wrong = 0  # guesses in a row of which nothing was right
        self._resume = 0  # tokens of the answer before there is another guess
        self._read(prompt)

    def next(self, made: Sequence[int], most: int) -> tuple[int, ...]:
        """At most so many tokens that may follow an answer's; none where nothing tells."""
        self._read(made[len(self._text) - self._prompt :])
        if len(made) < self._resume:
            return ()
        text = self._text
        for length in range(_LONGEST, 0, -1):
            begin = self._after.get(tuple(text[-length:]))
            if begin is not None:
                # What repeats itself up to its own end goes on doing so.
                period = len(text) - begin
                return tuple(text[begin + n % period] for n in range(min(self._size, most)))
        return ()

    def learn(self, guessed: int, right: int, made: int) -> None:
        """Of so many tokens guessed, the first `right` came; the answer has `made` by now."""
        if right:
            self._wrong = 0
            self._size = min(_MOST, 2 * self._size) if right == guessed else max(2, right + 1)
            return
        self._size = _FIRST
        self._wrong += 1
        self._resume = made + min(_PATIENCE, 2**self._wrong)

    def _read(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            for length in range(1, min(_LONGEST, len(self._text)) + 1):
                self._after[tuple(self._text[-length:])] = len(self._text)
            self._text.append(token)
