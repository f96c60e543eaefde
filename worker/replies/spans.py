"""Which spans of a text do the labels of its tokens make? As the transformers pipeline has it.

A long text is read in windows that overlap. Of a token that stands in several, the window counts
in which it has most text around it, so that no label depends on where a window was cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.request import TokenClassification
from engine.surface import Window
from service.bodies.classify import Aggregation
from worker.readings import Tag
from worker.replies.classify import listed
from worker.replies.usage import Reply, encoded

OUTSIDE = "O"
"""The label of what belongs to no span."""

Scores = NDArray[np.float32]  # [labels]


@dataclass(frozen=True, slots=True)
class Token:
    """A token's characters and scores; `continues` the word of the token before it."""

    start: int
    end: int
    scores: Scores
    continues: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Characters under one label."""

    label: str
    score: np.float32
    start: int
    end: int


def tagged(
    prompt: Tag, results: Sequence[TokenClassification], labels: Sequence[str], *, created: int
) -> Reply:
    """One entry a text: its spans, in their order."""
    aggregation = prompt.body.aggregation or Aggregation.SIMPLE
    left = iter(results)
    data = []
    for index, text in enumerate(prompt.body.input):
        tokens = merged(
            [
                _tokens(window, continues, next(left))
                for window, continues in zip(
                    prompt.windows[index], prompt.continues[index], strict=True
                )
            ]
        )
        spans = aggregated(tokens, labels, aggregation)
        data.append({"index": index, "spans": [_shown(span, str(text)) for span in spans]})
    body = listed(prompt.body, data, created)
    return encoded(body, prompt.readings, truncate=prompt.body.truncate)


def _tokens(window: Window, continues: Sequence[bool], result: TokenClassification) -> list[Token]:
    """Those of the window that are not special: special ones have no characters."""
    return [
        Token(start, end, scores, continues[position] if continues else False)
        for position, ((start, end), scores) in enumerate(
            zip(window.spans, result.scores, strict=True)
        )
        if (start, end) != (0, 0)
    ]


def _shown(span: Span, text: str) -> dict[str, Any]:
    return {
        "label": span.label,
        "score": span.score,
        "start": span.start,
        "end": span.end,
        "text": text[span.start : span.end],
    }


def merged(windows: Sequence[Sequence[Token]]) -> list[Token]:
    """Each token once, from the window in which it stands furthest from an edge made by cutting."""
    windows = sorted((each for each in windows if each), key=lambda each: each[0].start)
    if len(windows) < 2:
        return [token for window in windows for token in window]
    begins = [0]
    for before, after in pairwise(windows):
        begins.append(begins[-1] + _shift(before, after))
    total = begins[-1] + len(windows[-1])
    chosen: dict[int, tuple[int, Token]] = {}
    for begin, window in zip(begins, windows, strict=True):
        for position, token in enumerate(window, start=begin):
            left = position - begin if begin else total
            end = begin + len(window)
            right = end - 1 - position if end < total else total
            room = min(left, right)
            if position not in chosen or room > chosen[position][0]:
                chosen[position] = room, token
    return [chosen[position][1] for position in sorted(chosen)]


def _shift(before: Sequence[Token], after: Sequence[Token]) -> int:
    """By how many tokens the second window begins after the first."""
    ends = [(token.start, token.end) for token in before]
    begins = [(token.start, token.end) for token in after]
    for shift in range(len(ends)):
        if ends[shift:] == begins[: len(ends) - shift]:
            return shift
    return len(ends)


def aggregated(
    tokens: Sequence[Token], labels: Sequence[str], aggregation: Aggregation
) -> list[Span]:
    """The spans that are not outside."""
    match aggregation:
        case Aggregation.NONE:
            found = [_labelled([token], token.scores, labels) for token in tokens]
        case Aggregation.SIMPLE:
            found = _grouped([_labelled([token], token.scores, labels) for token in tokens])
        case Aggregation.FIRST | Aggregation.AVERAGE | Aggregation.MAX:
            found = _grouped(
                [_labelled(word, _of_word(word, aggregation), labels) for word in _words(tokens)]
            )
    return [span for span in found if span.label != OUTSIDE]


def _labelled(word: Sequence[Token], scores: Scores, labels: Sequence[str]) -> Span:
    best = int(scores.argmax())
    return Span(labels[best], scores[best], word[0].start, word[-1].end)


def _words(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    word: list[Token] = []
    for token in tokens:
        if word and not token.continues:
            yield word
            word = []
        word.append(token)
    if word:
        yield word


def _of_word(word: Sequence[Token], aggregation: Aggregation) -> Scores:
    match aggregation:
        case Aggregation.AVERAGE:
            return np.asarray(np.mean([token.scores for token in word], axis=0))
        case Aggregation.MAX:
            return max(word, key=lambda token: float(token.scores.max())).scores
        case _:
            return word[0].scores


def _grouped(spans: Sequence[Span]) -> list[Span]:
    """Neighbours of one tag joined, unless the later one begins (`B-`) a span of its own."""
    groups: list[list[Span]] = []
    for span in spans:
        begins = span.label.startswith("B-")
        if groups and not begins and _tag(groups[-1][-1].label) == _tag(span.label):
            groups[-1].append(span)
        else:
            groups.append([span])
    return [
        Span(
            group[0].label.split("-", 1)[-1],
            np.float32(np.mean([span.score for span in group])),
            group[0].start,
            group[-1].end,
        )
        for group in groups
    ]


def _tag(label: str) -> str:
    return label[2:] if label.startswith(("B-", "I-")) else label
