"""What stands in for an engine where no weights are? Made-up answers, the same every time.

To try the service and to test it; held to the same suite as the real engine.
"""

import hashlib
import math
import struct
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from engine.calls import CallForm
from engine.config import EngineConfig, Kind
from engine.errors import TemplateError, UnknownPrompt
from engine.generate.stops import StopWatch, cut
from engine.intake import Intake
from engine.model.scores import Activation, scores
from engine.model.scores import cut as cut_vector
from engine.plan.admit import refusal
from engine.plan.room import longest_first
from engine.request import (
    Classification,
    Embedding,
    Encoded,
    EncodeRequest,
    Failure,
    FailureReason,
    FinishReason,
    GenerateRequest,
    Generation,
    Request,
    Result,
    TokenClassification,
    TokenLogprob,
    Work,
)
from engine.surface import Counters, Pair, Status, Window, drive

BEGIN, END = 256, 257  # ids below are bytes of UTF-8
NAMES = {BEGIN: b"<begin>", END: b"<end>"}
VOCAB_SIZE = 258
CONTEXT_LENGTH = 32768
DIMENSIONS = 32
LABELS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        Kind.GENERATE: (),
        Kind.EMBED: (),
        Kind.CLASSIFY: ("negative", "neutral", "positive"),
        Kind.SCORE: ("LABEL_0",),
        Kind.TOKEN_CLASSIFY: ("O", "B-NAME", "I-NAME"),
    }
)
PROMPTS: Mapping[str, str] = MappingProxyType({"query": "query: "})


class StubTokenizer:
    """One token a byte, and one at each end of a text; `prompts` are the catalog's."""

    vocab_size = VOCAB_SIZE
    context_length: int | None = CONTEXT_LENGTH
    eos_id: int | None = END
    calls: CallForm | None = None

    def __init__(self, prompts: Mapping[str, str] = PROMPTS) -> None:
        self.prompts: Mapping[str, str] = MappingProxyType({**PROMPTS, **prompts})

    def encode(
        self, texts: Sequence[str], *, prompt_name: str | None = None, limit: int | None = None
    ) -> list[list[int]]:
        """Ids of each text between its two special tokens."""
        if prompt_name is not None and prompt_name not in self.prompts:
            raise UnknownPrompt.of(prompt_name, self.prompts)
        prompt = "" if prompt_name is None else self.prompts[prompt_name]
        room = None if limit is None else max(0, limit - 2)
        return [[BEGIN, *self.encode_rendered(prompt + text)[:room], END] for text in texts]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, limit: int | None = None
    ) -> list[Pair]:
        """Each pair as one sequence, a special token at each end of both texts."""
        return [self._pair(pair, limit) for pair in pairs]

    def _pair(self, pair: tuple[str, str], limit: int | None) -> Pair:
        first, second = map(self.encode_rendered, pair)
        room = len(first) + len(second) if limit is None else max(0, limit - 4)
        kept, also = longest_first(len(first), len(second), room)
        ids = [BEGIN, *first[:kept], END, BEGIN, *second[:also], END]
        return Pair(ids, kept + 2)

    def encode_windows(self, text: str, *, limit: int, overlap: int) -> list[Window]:
        """The text in pieces of at most `limit` tokens, neighbours sharing `overlap` of them."""
        room = limit - 2
        if not 0 <= overlap < room:
            msg = f"pieces of {limit} tokens cannot share {overlap}: {max(0, room)} are the text's"
            raise ValueError(msg)
        ids = self.encode_rendered(text)
        spans = [(n, n + 1) for n, letter in enumerate(text) for _ in letter.encode("utf-8")]
        starts = range(0, max(1, len(ids) - overlap), room - overlap)
        return [
            Window(
                [BEGIN, *ids[start : start + room], END],
                [(0, 0), *spans[start : start + room], (0, 0)],
            )
            for start in starts
        ]

    def continues(self, text: str, window: Window) -> list[bool]:
        """Which tokens follow no space."""
        return [start > 0 and " " not in text[start - 1 : start + 1] for start, _ in window.spans]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt, after its first special token."""
        return [BEGIN, *self.encode_rendered(text)]

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of the text alone."""
        return list(text.encode("utf-8"))

    def render_chat(
        self, messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """`role: content` a line; TemplateError where either is no text, or there are tools."""
        if tools:
            msg = "the stub calls no tools"
            raise TemplateError(msg)
        lines = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                msg = "every message needs a role and a content that are text"
                raise TemplateError(msg)
            lines.append(f"{role}: {content}\n")
        return "".join(lines)

    def token_bytes(self, token_id: int) -> bytes:
        """The byte, or the name of a special token."""
        return bytes([token_id]) if token_id < BEGIN else NAMES[token_id]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The bytes' text, special tokens left out or written as <begin> and <end>."""
        kept = [i for i in ids if i < BEGIN or not skip_special_tokens]
        content = b"".join(map(self.token_bytes, kept))
        return content.decode("utf-8", errors="replace")


class StubEngine:
    """Answers `results_per_step` requests a step, in order, each step taking `seconds_per_step`.

    A vector, or a text's logits, follow from a digest of the tokens; a token is part of a name
    where its word begins with a capital letter; an answer repeats the prompt's last tokens, and
    ends by itself where max_tokens leaves room for the whole prompt. Every token was certain; a
    grammar is refused.
    """

    def __init__(
        self, config: EngineConfig, *, results_per_step: int = 1, seconds_per_step: float = 0.0
    ) -> None:
        self._config = config
        self._results_per_step = results_per_step
        self._seconds_per_step = seconds_per_step
        self._tokenizer = StubTokenizer()
        self._waiting: deque[Request] = deque()
        self._intake = Intake(self._refuse)

    @property
    def pending(self) -> int:
        """Requests submitted and not yet answered."""
        return self._intake.pending

    @property
    def counters(self) -> Counters:
        """What was done so far."""
        return self._intake.counters

    @property
    def dimensions(self) -> int | None:
        """Length of the vectors; None where it makes none."""
        return DIMENSIONS if self._config.kind is Kind.EMBED else None

    @property
    def smaller_dimensions(self) -> tuple[int, ...]:
        """Lengths that the vectors may be cut to, ascending."""
        return tuple(sorted(size for size in self._config.dimensions if size < DIMENSIONS))

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of what it scores."""
        return LABELS[self._config.kind]

    @property
    def status(self) -> Status:
        """How it runs."""
        return Status(path="stub", same_bytes=True, token_budget=self._config.token_budget)

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence, its answer included."""
        return self._config.context_length or CONTEXT_LENGTH

    def submit(self, requests: Iterable[Request]) -> None:
        """Take requests in; a duplicate id raises ValueError."""
        self._waiting.extend(self._intake.admit(requests))

    def step(self) -> list[Result]:
        """Answer the next few requests."""
        refused = self._intake.refused()
        if refused or not self._waiting:
            return refused
        if self._seconds_per_step:
            time.sleep(self._seconds_per_step)
        taken = min(self._results_per_step, len(self._waiting))
        results = [self._answer(self._waiting.popleft()) for _ in range(taken)]
        self._intake.counters += Counters(steps=1, padded_tokens=sum(map(_tokens, results)))
        return self._intake.answer(results)

    def abort(self, ids: Iterable[Hashable]) -> None:
        """Drop these requests without a result."""
        dropped = self._intake.forget(ids)
        self._waiting = deque(request for request in self._waiting if request.id not in dropped)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Submit all and yield each one's index and result, as they finish."""
        yield from drive(self, requests)

    def _answer(self, request: Request) -> Encoded | Generation:
        match request:
            case EncodeRequest():
                return _encode(request, self._config.kind)
            case GenerateRequest():
                return _generate(request, self._tokenizer)
            case unreachable:
                assert_never(unreachable)

    def _refuse(self, request: Request) -> Failure | None:
        if isinstance(request, GenerateRequest) and request.sampling.grammar is not None:
            message = "The stub follows no grammar."
            return Failure(request.id, FailureReason.INVALID, message, "grammar")
        return refusal(
            request,
            kind=self._config.kind,
            context_length=self.context_length,
            vocab_size=VOCAB_SIZE,
            dimensions=(
                () if self.dimensions is None else (*self.smaller_dimensions, self.dimensions)
            ),
        )


def _encode(request: EncodeRequest, kind: Kind) -> Encoded:
    length = len(request.tokens)
    work = Work(computed_tokens=length, rows=1)
    match kind:
        case Kind.EMBED:
            raw = _digest(request, DIMENSIONS)
            vector = cut_vector(raw / np.linalg.norm(raw), request.dimensions, normalizes=True)
            return Embedding(request.id, vector, length, work)
        case Kind.CLASSIFY | Kind.SCORE:
            logits = _digest(request, len(LABELS[kind])) / np.float32(32)
            activation = Activation.SOFTMAX if kind is Kind.CLASSIFY else Activation.SIGMOID
            return Classification(request.id, logits, scores(logits, activation), length, work)
        case Kind.TOKEN_CLASSIFY:
            logits = 4 * np.eye(3, dtype=np.float32)[_names(request.tokens)]
            return TokenClassification(request.id, scores(logits, Activation.SOFTMAX), length, work)
        case Kind.GENERATE:
            msg = "a generating model encodes nothing"
            raise ValueError(msg)
        case unreachable:
            assert_never(unreachable)


def _digest(request: EncodeRequest, count: int) -> NDArray[np.float32]:
    """So many numbers from -127.5 to 127.5 that follow from the tokens, and a pair's boundary."""
    told = (*request.tokens, *(() if request.first is None else (VOCAB_SIZE + request.first,)))
    digest = hashlib.shake_256(struct.pack(f"<{len(told)}I", *told)).digest(count)
    return np.frombuffer(digest, dtype=np.uint8).astype(np.float32) - 127.5


def _names(tokens: Sequence[int]) -> list[int]:
    """A label each: 1 begins a name, 2 goes on with it, 0 is outside."""
    found: list[int] = []
    inside = False  # a word
    for token in tokens:
        letter = token < BEGIN and (token > 127 or chr(token).isalpha())  # or a part of one
        if inside and letter:
            found.append(2 if found[-1] else 0)
        else:
            found.append(1 if token < 128 and chr(token).isupper() else 0)
        inside = letter
    return found


def _generate(request: GenerateRequest, tokenizer: StubTokenizer) -> Generation:
    sampling = request.sampling
    said = [token for token in request.prompt if token < BEGIN]
    token_ids = [*said, END] if len(said) < sampling.max_tokens else said[-sampling.max_tokens :]
    if sampling.stop:
        watch = StopWatch(tokenizer.decode, sampling.stop)
        end = next((n for n, token in enumerate(token_ids, start=1) if watch.push(token)), None)
        token_ids = token_ids[:end]
    text, stopped = cut(tokenizer.decode(token_ids), sampling.stop)
    by_itself = stopped or token_ids[-1] == END
    return Generation(
        id=request.id,
        text=text,
        token_ids=tuple(token_ids),
        finish_reason=FinishReason.STOP if by_itself else FinishReason.LENGTH,
        input_tokens=len(request.prompt),
        cached_tokens=0,
        output_tokens=len(token_ids),
        logprobs=_certain(token_ids, sampling.logprobs),
        prompt_logprobs=_certain(request.prompt[1:], sampling.prompt_logprobs),
        candidates=tuple(-math.log(len(sampling.candidates)) for _ in sampling.candidates),
    )


def _certain(token_ids: Sequence[int], count: int | None) -> tuple[TokenLogprob, ...] | None:
    if count is None:
        return None
    return tuple(TokenLogprob(token, 0.0, ((token, 0.0),)[:count]) for token in token_ids)


def _tokens(result: Encoded | Generation) -> int:
    return result.input_tokens + (result.output_tokens if isinstance(result, Generation) else 0)
