"""What stands in for an engine where no weights are? Made-up answers, the same every time.

To try the service and to test it; held to the same suite as the real engine.
"""

import hashlib
import struct
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, assert_never

import numpy as np

from engine.config import EngineConfig, Kind
from engine.errors import ModelLoadError, TemplateError
from engine.generate.stops import StopWatch, cut
from engine.intake import Intake
from engine.plan.admit import refusal
from engine.request import (
    Embedding,
    EncodeRequest,
    Failure,
    FinishReason,
    GenerateRequest,
    Generation,
    Request,
    Result,
)
from engine.surface import Counters, Pair, Status, Window, drive

BEGIN, END = 256, 257  # ids below are bytes of UTF-8
VOCAB_SIZE = 258
CONTEXT_LENGTH = 32768
DIMENSIONS = 32


class StubTokenizer:
    """One token a byte, and one at each end of a text."""

    vocab_size = VOCAB_SIZE
    context_length: int | None = CONTEXT_LENGTH

    prompts: Mapping[str, str] = MappingProxyType({"query": "query: "})

    def encode(
        self, texts: Sequence[str], *, prompt_name: str | None = None, limit: int | None = None
    ) -> list[list[int]]:
        """Ids of each text between its two special tokens."""
        texts = [self.prompts.get(prompt_name or "", "") + text for text in texts]
        room = None if limit is None else max(0, limit - 2)
        return [[BEGIN, *self.encode_rendered(text)[:room], END] for text in texts]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, limit: int | None = None
    ) -> list[Pair]:
        """Each pair as one sequence, a special token at each end of both texts."""
        raise NotImplementedError

    def encode_windows(self, text: str, *, limit: int, overlap: int) -> list[Window]:
        """The text in pieces of at most `limit` tokens."""
        raise NotImplementedError

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt, after its first special token."""
        return [BEGIN, *self.encode_rendered(text)]

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of the text alone."""
        return list(text.encode("utf-8"))

    def render_chat(self, messages: list[dict[str, Any]]) -> str:
        """`role: content` a line; TemplateError where either is no text."""
        lines = []
        for message in messages:
            role, content = message.get("role"), message.get("content")
            if not isinstance(role, str) or not isinstance(content, str):
                msg = "every message needs a role and a content that are text"
                raise TemplateError(msg)
            lines.append(f"{role}: {content}\n")
        return "".join(lines)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The bytes' text, special tokens left out or written as <begin> and <end>."""
        names = {BEGIN: b"<begin>", END: b"<end>"} if not skip_special_tokens else {}
        content = b"".join(names.get(i, bytes([i]) if i < BEGIN else b"") for i in ids)
        return content.decode("utf-8", errors="replace")


class StubEngine:
    """Answers `results_per_step` requests a step, in order, each step taking `seconds_per_step`.

    A vector follows from a digest of the tokens; an answer repeats the prompt's last tokens, and
    ends by itself where max_tokens leaves room for the whole prompt.
    """

    def __init__(
        self, config: EngineConfig, *, results_per_step: int = 1, seconds_per_step: float = 0.0
    ) -> None:
        if config.kind not in (Kind.GENERATE, Kind.EMBED):
            msg = f"no engine serves models of kind {config.kind.value} yet"
            raise ModelLoadError(msg)
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
        """Length of the vectors; None where it generates."""
        return DIMENSIONS if self._config.kind is Kind.EMBED else None

    @property
    def smaller_dimensions(self) -> tuple[int, ...]:
        """Lengths that the vectors may be cut to."""
        return self._config.dimensions

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of what it scores."""
        return ()

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
        results = [_answer(self._waiting.popleft(), self._tokenizer) for _ in range(taken)]
        self._intake.counters += Counters(steps=1, padded_tokens=sum(map(_tokens, results)))
        return self._intake.answer(results)

    def abort(self, ids: Iterable[Hashable]) -> None:
        """Drop these requests without a result."""
        dropped = self._intake.forget(ids)
        self._waiting = deque(request for request in self._waiting if request.id not in dropped)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Submit all and yield each one's index and result, as they finish."""
        yield from drive(self, requests)

    def _refuse(self, request: Request) -> Failure | None:
        return refusal(
            request,
            kind=self._config.kind,
            context_length=self.context_length,
            vocab_size=VOCAB_SIZE,
        )


def _answer(request: Request, tokenizer: StubTokenizer) -> Embedding | Generation:
    match request:
        case EncodeRequest():
            return _embed(request)
        case GenerateRequest():
            return _generate(request, tokenizer)
        case unreachable:
            assert_never(unreachable)


def _embed(request: EncodeRequest) -> Embedding:
    packed = struct.pack(f"<{len(request.tokens)}I", *request.tokens)
    digest = hashlib.shake_256(packed).digest(DIMENSIONS)
    raw = np.frombuffer(digest, dtype=np.uint8).astype(np.float32) - 127.5
    return Embedding(
        id=request.id, vector=raw / np.linalg.norm(raw), input_tokens=len(request.tokens)
    )


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
    )


def _tokens(result: Embedding | Generation) -> int:
    return result.input_tokens + (result.output_tokens if isinstance(result, Generation) else 0)
