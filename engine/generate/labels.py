"""How likely is each of several labels as an answer, without a decode loop?

Labels are a tree of tokens behind the prompt. What the model says after each fork's tokens tells
how likely its next tokens are; a label is as likely as the steps on its way. Forks differ from each
other by a few tokens behind one prompt, so they are computed as one batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fork:
    """After these tokens, behind the prompt and the stem, one of the candidates follows."""

    tokens: Tokens
    candidates: Tokens


@dataclass(frozen=True, slots=True)
class LabelTree:
    """Labels of a prompt. All begin with the `stem`, which counts as said.

    `ways` has for each label its steps after the stem: (fork, place among its candidates).
    """

    stem: Tokens
    forks: tuple[Fork, ...]
    ways: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def of(cls, labels: Sequence[Tokens], end: int | None) -> "LabelTree":
        """`end` is the token after a label that is the beginning of another."""
        stem = _common(labels)
        rests = [label[len(stem) :] for label in labels]
        ended = [
            (*rest, end) if end is not None and _goes_on(rest, rests) else rest for rest in rests
        ]
        candidates: dict[Tokens, dict[int, int]] = {}
        for rest in ended:
            for place, token in enumerate(rest):
                known = candidates.setdefault(rest[:place], {})
                known.setdefault(token, len(known))
        number = {tokens: index for index, tokens in enumerate(candidates)}
        ways = tuple(
            tuple((number[rest[:n]], candidates[rest[:n]][token]) for n, token in enumerate(rest))
            for rest in ended
        )
        return cls(stem, tuple(Fork(each, tuple(candidates[each])) for each in candidates), ways)

    @property
    def tokens(self) -> int:
        """How many are computed behind the prompt, where all forks share what they can."""
        return len(self.stem) + len(self.forks) - 1

    def logprobs(self, found: Sequence[Sequence[float]]) -> list[float]:
        """Of each label, from those of each fork's candidates."""
        return [sum(found[fork][place] for fork, place in way) for way in self.ways]


def _common(labels: Sequence[Tokens]) -> Tokens:
    """The tokens that all begin with."""
    first, last = min(labels), max(labels)
    length = next(
        (n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
        min(len(first), len(last)),
    )
    return first[:length]


def _goes_on(rest: Tokens, rests: Sequence[Tokens]) -> bool:
    return any(len(other) > len(rest) and other[: len(rest)] == rest for other in rests)
