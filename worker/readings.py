"""Which sequences does an encoder's line have read: its texts tokenised, paired, cut?

A value here holds them in the order in which the engine is asked, which `worker.replies` reads the
results in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from engine.surface import TokenizerLike, Window
from service.bodies.check import Encoding, InvalidBody
from service.bodies.classify import Aggregation, ClassifyBody
from service.bodies.embeddings import EmbeddingsBody
from service.bodies.moderations import ModerationBody
from service.bodies.score import RerankBody, ScoreBody
from service.catalog import Model, ModelKind, Moderation
from service.faults import Fault

OVERLAP = 128
"""Most tokens that two windows of a long text share where the body does not say; never more than
a quarter of a window."""

UNLIMITED = 2**31 - 1

QUERY_PROMPTS = ("query",)
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Under which names the prompts stand that sentence-transformers puts before either."""

OF_WORDS = frozenset({Aggregation.FIRST, Aggregation.AVERAGE, Aggregation.MAX})


@dataclass(frozen=True, slots=True)
class Reading:
    """One sequence; `first` of a pair's tokens are of its first text, `cut` were left out."""

    tokens: tuple[int, ...]
    first: int | None = None
    cut: int = 0


@dataclass(frozen=True, slots=True)
class Embed:
    """Vectors of texts."""

    body: EmbeddingsBody
    readings: tuple[Reading, ...]

    def param(self, _position: int) -> str:
        """The parameter that the reading at that position comes from."""
        return "input"


@dataclass(frozen=True, slots=True)
class Classify:
    """Texts under the labels that the model was trained on."""

    body: ClassifyBody
    readings: tuple[Reading, ...]

    def param(self, _position: int) -> str:
        """The parameter that the reading at that position comes from."""
        return "input"


@dataclass(frozen=True, slots=True)
class Moderate:
    """Texts under the labels that the reference's categories are mapped on."""

    body: ModerationBody
    readings: tuple[Reading, ...]
    mapping: Moderation

    def param(self, _position: int) -> str:
        """The parameter that the reading at that position comes from."""
        return "input"


@dataclass(frozen=True, slots=True)
class ZeroShot:
    """Texts, then each label in each template, all to be embedded and compared."""

    body: ClassifyBody
    texts: tuple[Reading, ...]
    labels: tuple[Reading, ...]

    @property
    def readings(self) -> tuple[Reading, ...]:
        """All of them."""
        return self.texts + self.labels

    def param(self, position: int) -> str:
        """The parameter that the reading at that position comes from."""
        return "input" if position < len(self.texts) else "labels"


@dataclass(frozen=True, slots=True)
class Tag:
    """The windows of each text; with each, which tokens go on with a word where that matters."""

    body: ClassifyBody
    windows: tuple[tuple[Window, ...], ...]
    continues: tuple[tuple[tuple[bool, ...], ...], ...]

    @property
    def readings(self) -> tuple[Reading, ...]:
        """All windows of all texts."""
        return tuple(Reading(tuple(each.tokens)) for text in self.windows for each in text)

    def param(self, _position: int) -> str:
        """The parameter that the reading at that position comes from."""
        return "input"


@dataclass(frozen=True, slots=True)
class Pairs:
    """Both sides' texts, paired, for a model that reads them together."""

    body: ScoreBody | RerankBody
    readings: tuple[Reading, ...]

    def param(self, _position: int) -> str:
        """The parameter that the reading at that position comes from: the longer side, mostly."""
        return self.body.names[1]


@dataclass(frozen=True, slots=True)
class Compare:
    """Both sides' texts, to be embedded and compared."""

    body: ScoreBody | RerankBody
    first: tuple[Reading, ...]
    second: tuple[Reading, ...]

    @property
    def readings(self) -> tuple[Reading, ...]:
        """All of them."""
        return self.first + self.second

    def param(self, position: int) -> str:
        """The parameter that the reading at that position comes from."""
        return self.body.names[0 if position < len(self.first) else 1]


Encode = Embed | Classify | Moderate | ZeroShot | Tag | Pairs | Compare


def read(body: Encoding, *, model: Model, tokenizer: TokenizerLike) -> Encode:
    """What the model is to read for a checked body. Raises InvalidBody."""
    reader = _Reader(model, tokenizer, truncate=body.truncate is True)
    match body:
        case EmbeddingsBody():
            return Embed(body, reader.inputs(body.input, body.prompt_name))
        case ClassifyBody():
            return _classify(body, model.kind, reader)
        case ModerationBody():
            if model.moderation is None:  # not served any longer, since the file was checked
                message = f"The provided model '{model.id}' has no moderation."
                raise InvalidBody(Fault(message, "model", "model_not_found"))
            return Moderate(body, reader.texts(body.input), model.moderation)
        case ScoreBody() | RerankBody():
            if model.kind is ModelKind.SCORE:
                return Pairs(body, reader.pairs(body.pairs))
            first = reader.texts(body.first, reader.known(QUERY_PROMPTS))
            return Compare(body, first, reader.texts(body.second, reader.known(DOCUMENT_PROMPTS)))
        case unreachable:
            assert_never(unreachable)


def _classify(body: ClassifyBody, kind: ModelKind, reader: "_Reader") -> Encode:
    if kind is ModelKind.TOKEN_CLASSIFY:
        texts = [text for text in body.input if isinstance(text, str)]
        windows = tuple(reader.windows(text, body.overlap) for text in texts)
        of_words = body.aggregation in OF_WORDS
        continues = tuple(
            tuple(reader.continues(text, window) if of_words else () for window in each)
            for text, each in zip(texts, windows, strict=True)
        )
        return Tag(body, windows, continues)
    texts_read = reader.inputs(body.input, body.prompt_name)
    if kind is ModelKind.EMBED:
        return ZeroShot(body, texts_read, reader.texts(body.labelled, body.prompt_name))
    return Classify(body, texts_read)


class _Reader:
    """Tokenises for one model, cutting what is too long where that was asked for.

    What is too long otherwise is left to the engine to refuse.
    """

    def __init__(self, model: Model, tokenizer: TokenizerLike, *, truncate: bool) -> None:
        self._tokenizer = tokenizer
        self._limit = model.context_length or tokenizer.context_length or UNLIMITED
        self._truncate = truncate

    def known(self, names: Sequence[str]) -> str | None:
        """The first of these prompts that the model has."""
        return next((name for name in names if name in self._tokenizer.prompts), None)

    def inputs(
        self, inputs: Sequence[str] | Sequence[list[int]], prompt_name: str | None
    ) -> tuple[Reading, ...]:
        """Texts, or token ids, which come from the client as the model is to see them."""
        texts = [item for item in inputs if isinstance(item, str)]
        if texts:
            return self.texts(texts, prompt_name)
        most = self._limit if self._truncate else None
        ids = [item for item in inputs if not isinstance(item, str)]
        return tuple(Reading(tuple(each[:most]), cut=len(each) - len(each[:most])) for each in ids)

    def texts(self, texts: Sequence[str], prompt_name: str | None = None) -> tuple[Reading, ...]:
        """Each text with its special tokens, after that prompt."""
        if prompt_name is not None and prompt_name not in self._tokenizer.prompts:
            raise InvalidBody(_no_prompt(self._tokenizer))
        whole = self._tokenizer.encode(texts, prompt_name=prompt_name)
        long = self._too_long([len(ids) for ids in whole])
        again = self._tokenizer.encode(
            [texts[position] for position in long], prompt_name=prompt_name, limit=self._limit
        )
        cut = dict(zip(long, again, strict=True))
        kept = [cut.get(position, ids) for position, ids in enumerate(whole)]
        return tuple(
            Reading(tuple(ids), cut=len(full) - len(ids))
            for full, ids in zip(whole, kept, strict=True)
        )

    def pairs(self, pairs: Sequence[tuple[str, str]]) -> tuple[Reading, ...]:
        """Each pair as one sequence."""
        whole = self._tokenizer.encode_pairs(pairs)
        long = self._too_long([len(pair.tokens) for pair in whole])
        again = self._tokenizer.encode_pairs(
            [pairs[position] for position in long], limit=self._limit
        )
        cut = dict(zip(long, again, strict=True))
        kept = [cut.get(position, pair) for position, pair in enumerate(whole)]
        return tuple(
            Reading(tuple(pair.tokens), pair.first, cut=len(full.tokens) - len(pair.tokens))
            for full, pair in zip(whole, kept, strict=True)
        )

    def windows(self, text: str, overlap: int | None) -> tuple[Window, ...]:
        """The text in windows of the model's context."""
        most = self._limit // 2
        if overlap is not None and overlap > most:
            raise InvalidBody(_bad_overlap(f"at most {most} of this model's {self._limit} tokens"))
        shared = min(OVERLAP, self._limit // 4) if overlap is None else overlap
        try:
            pieces = self._tokenizer.encode_windows(text, limit=self._limit, overlap=shared)
        except ValueError as error:  # half of a tiny context is no room beside special tokens
            raise InvalidBody(_bad_overlap(str(error))) from error
        return tuple(pieces)

    def continues(self, text: str, window: Window) -> tuple[bool, ...]:
        """Which of the window's tokens go on with a word."""
        return tuple(self._tokenizer.continues(text, window))

    def _too_long(self, lengths: Sequence[int]) -> list[int]:
        """Positions of what is to be cut."""
        if not self._truncate:
            return []
        return [position for position, length in enumerate(lengths) if length > self._limit]


def _no_prompt(tokenizer: TokenizerLike) -> Fault:
    known = ", ".join(sorted(tokenizer.prompts)) or "none"
    message = f"Invalid value for 'prompt_name': this model has these prompts: {known}."
    return Fault(message, "prompt_name", "invalid_value")


def _bad_overlap(reason: str) -> Fault:
    return Fault(f"Invalid value for 'overlap': {reason}.", "overlap", "invalid_value")
