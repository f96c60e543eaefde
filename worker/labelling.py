"""When is an answer one of a few labels, so that each is scored instead of one written?"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from engine.generate.labels import LabelTree
from engine.generate.sampling.chance import uniform
from engine.request import FinishReason, Generation, Sampling
from engine.surface import TokenizerLike


@dataclass(frozen=True, slots=True)
class Labels:
    """What an answer may be: each text's name, the text, its tokens and their tree."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    tree: LabelTree


@dataclass(frozen=True, slots=True)
class Scored:
    """The log probability of each label, and which is the answer of each choice."""

    logprobs: Mapping[str, float]
    answers: tuple[Generation, ...]

    @property
    def probabilities(self) -> dict[str, float]:
        """Of each label, among the labels."""
        return dict(zip(self.logprobs, _shares(list(self.logprobs.values()), 1.0), strict=True))


def labels_of(
    texts: Mapping[str, str] | None, sampling: Sampling, tokenizer: TokenizerLike
) -> Labels | None:
    """None where the answer has to be written after all: something changes tokens on its way."""
    if texts is None or _changes(sampling):
        return None
    labels = _labels(tuple(texts.items()), tokenizer)
    # Too few tokens for a label would cut it; and without a fork there is nothing to score.
    if not labels.tree.forks or max(map(len, labels.tokens)) > sampling.max_tokens:
        return None
    return labels


@lru_cache(maxsize=64)  # the lines of a file mostly choose among the same labels
def _labels(texts: tuple[tuple[str, str], ...], tokenizer: TokenizerLike) -> Labels:
    tokens = tuple(tuple(tokenizer.encode_rendered(text)) for _, text in texts)
    names, written = zip(*texts, strict=True)
    return Labels(names, written, tokens, LabelTree.of(tokens, tokenizer.eos_id))


def _changes(sampling: Sampling) -> bool:
    plain = Sampling(
        sampling.max_tokens, sampling.temperature, seed=sampling.seed, grammar=sampling.grammar
    )
    return sampling != plain


def scored(
    labels: Labels, found: Sequence[Generation], sampling: Sampling, *, taken: int, choices: int
) -> Scored:
    """From what each fork's request answered: `taken` is the tokens of their common prompt.

    The likeliest label at temperature 0, else one drawn by the labels' probabilities.
    """
    logprobs = labels.tree.logprobs([each.candidates for each in found])
    # One of them paid for the prompt.
    cached = min(taken, *(each.cached_tokens for each in found))
    answers = tuple(
        _answer(labels, _chosen(logprobs, sampling, choice), found[0], taken, cached)
        for choice in range(choices)
    )
    return Scored(dict(zip(labels.names, logprobs, strict=True)), answers)


def _answer(labels: Labels, chosen: int, first: Generation, taken: int, cached: int) -> Generation:
    tokens = labels.tokens[chosen]
    return Generation(
        id=first.id,
        text=labels.texts[chosen],
        token_ids=tokens,
        finish_reason=FinishReason.STOP,
        input_tokens=taken,
        cached_tokens=cached,
        output_tokens=len(tokens),
    )


def _chosen(logprobs: Sequence[float], sampling: Sampling, choice: int) -> int:
    if sampling.temperature == 0:
        return max(range(len(logprobs)), key=lambda place: logprobs[place])
    aim = uniform(sampling.seed, choice, 0)
    reached = 0.0
    for place, share in enumerate(_shares(logprobs, sampling.temperature)):
        reached += share
        if aim < reached:
            return place
    return len(logprobs) - 1


def _shares(logprobs: Sequence[float], temperature: float) -> list[float]:
    best = max(logprobs)
    weights = [math.exp((each - best) / temperature) for each in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
