"""How do requests become results on one model? Submit them, step until none is pending.

    engine = Engine(EngineConfig(model=folder, kind=Kind.EMBED))
    for index, result in engine.run(requests):
        ...

An engine belongs to one thread. An exception from `step` is a bug or a broken device: the engine
is then to be thrown away, and what was pending to be submitted to another.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import assert_never

import torch

from engine.config import EngineConfig, Kind
from engine.encode.loop import EncodeLoop
from engine.encode.probe import probe
from engine.errors import ModelLoadError
from engine.generate.answer import unfollowed
from engine.generate.continuous import ContinuousLoop
from engine.generate.kv_room import tokens_that_fit
from engine.generate.padded import GenerateLoop
from engine.generate.probe import continuous_forward
from engine.generate.span_forward import SpanForward
from engine.intake import Intake
from engine.memory import most_held
from engine.model.grammar import GrammarError, Grammars
from engine.model.load import Decoder, load_decoder, load_encoder, speed_up
from engine.outcome import Outcome
from engine.plan.admit import refusal
from engine.request import EncodeRequest, Failure, FailureReason, GenerateRequest, Request, Result
from engine.surface import Counters, Status, drive


class Engine:
    """One model on one device. Raises ModelLoadError where the folder holds none it can run."""

    def __init__(
        self, config: EngineConfig, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._kind = config.kind
        self._path, self._same_bytes = "padded", False
        self.dimensions: int | None = None  # length of the vectors, where it makes any
        self.smaller_dimensions: tuple[int, ...] = ()  # what they may be cut to
        self.labels: tuple[str, ...] = ()  # names of what it scores
        self._grammars: Grammars | None = None  # of a model that generates
        self._loop: EncodeLoop | GenerateLoop | ContinuousLoop
        match config.kind:
            case Kind.EMBED | Kind.CLASSIFY | Kind.SCORE | Kind.TOKEN_CLASSIFY:
                encoder = load_encoder(config)
                found = probe(encoder, config)
                self._loop = EncodeLoop(
                    encoder,
                    found.forward,
                    kind=config.kind,
                    token_budget=config.token_budget,
                    limit=found.limit,
                    clock=clock,
                )
                self._path, self._same_bytes = found.forward.path, found.same_bytes
                self.dimensions = encoder.head.dimensions
                self.smaller_dimensions = encoder.head.smaller_dimensions
                self.labels = encoder.head.labels
                self.context_length, self._vocab_size = encoder.context_length, encoder.vocab_size
                self._device = encoder.device
            case Kind.GENERATE:
                decoder, self._loop = _generate_loop(config, clock)
                self._grammars = decoder.grammars
                if isinstance(self._loop, ContinuousLoop):
                    self._path, self._same_bytes = "packed", config.deterministic
                self.context_length, self._vocab_size = decoder.context_length, decoder.vocab_size
                self._device = decoder.device
            case unreachable:
                assert_never(unreachable)
        if config.deterministic and not self._same_bytes:
            msg = "deterministic: its results are not the same to the bit in any company here"
            raise ModelLoadError(msg)
        self._config = config
        self._intake = Intake(self._refuse)

    @property
    def status(self) -> Status:
        """How it runs."""
        loop = self._loop
        return Status(
            path=self._path,
            same_bytes=self._same_bytes,
            token_budget=loop.token_budget
            if isinstance(loop, EncodeLoop)
            else self._config.token_budget,
            memory_bytes=most_held(self._device),
            kv_held=loop.kv_held if isinstance(loop, ContinuousLoop) else None,
            kv_tokens=loop.kv_tokens if isinstance(loop, ContinuousLoop) else None,
            seats=self._config.max_sequences if isinstance(loop, ContinuousLoop) else None,
        )

    @property
    def pending(self) -> int:
        """Requests submitted and not yet answered."""
        return self._intake.pending

    @property
    def counters(self) -> Counters:
        """What was done so far."""
        return self._intake.counters

    def submit(self, requests: Iterable[Request]) -> None:
        """Take requests in. A bad one gets its Failure from the next step.

        Raises ValueError, and takes none in, where an id is in flight already or comes twice.
        """
        accepted = self._intake.admit(requests)
        match self._loop:
            case EncodeLoop():
                self._loop.add([r for r in accepted if isinstance(r, EncodeRequest)])
            case GenerateLoop() | ContinuousLoop():
                self._loop.add([r for r in accepted if isinstance(r, GenerateRequest)])
            case unreachable:
                assert_never(unreachable)

    @torch.inference_mode()
    def step(self) -> list[Result]:
        """Do one bounded piece of work: a batch of texts, a piece of prompts, a token of each row.

        Returns what was finished by it, in any order; nothing where nothing is pending.
        """
        refused = self._intake.refused()
        if refused or not self._intake.pending:
            return refused
        outcome: Outcome = self._loop.step()
        self._intake.counters += outcome.cost + Counters(steps=1)
        return self._intake.answer(outcome.results)

    def abort(self, ids: Iterable[Hashable]) -> None:
        """Drop these requests, running or not, without a result; unknown ids are passed over."""
        dropped = self._intake.forget(ids)
        if dropped:
            self._loop.remove(dropped)

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Submit all, yield each one's index and result as they finish; needs an idle engine."""
        yield from drive(self, requests)

    @property
    def _lengths(self) -> tuple[int, ...]:
        return (
            self.smaller_dimensions
            if self.dimensions is None
            else (*self.smaller_dimensions, self.dimensions)
        )

    def _refuse(self, request: Request) -> Failure | None:
        refused = refusal(
            request,
            kind=self._kind,
            context_length=self.context_length,
            vocab_size=self._vocab_size,
            dimensions=self._lengths,
        )
        if (
            refused is None
            and isinstance(request, GenerateRequest)
            and _untold(self._loop, request)
        ):
            message = (
                "This model runs in padded batches, where the log probabilities of a prompt's "
                "tokens are not computed."
            )
            return Failure(request.id, FailureReason.INVALID, message, "logprobs")
        if refused is None and self._grammars is not None and isinstance(request, GenerateRequest):
            return _refuse_grammar(request, self._grammars)
        return refused


def _untold(loop: object, request: GenerateRequest) -> bool:
    return isinstance(loop, GenerateLoop) and request.sampling.prompt_logprobs is not None


def _refuse_grammar(request: GenerateRequest, grammars: Grammars) -> Failure | None:
    if request.sampling.grammar is None:
        return None
    try:
        grammars.check(request.sampling.grammar)
    except GrammarError as error:
        return unfollowed(request.id, error)
    return None


@torch.inference_mode()
def _generate_loop(
    config: EngineConfig, clock: Callable[[], float]
) -> tuple[Decoder, GenerateLoop | ContinuousLoop]:
    """Continuous batching, or padded batches where the model does not allow it."""
    decoder = load_decoder(config)
    on_cuda = decoder.device.type == "cuda"
    room = partial(tokens_that_fit, decoder, config) if on_cuda else None
    found = continuous_forward(
        decoder, config.cache_tokens, config.quantize, room, deterministic=config.deterministic
    )
    if found is not None:
        forward, tokens = found
        if config.cuda_graphs and isinstance(forward, SpanForward):
            forward.capture(config.max_sequences)
        return decoder, ContinuousLoop(decoder, forward, tokens, config, clock)
    decoder = load_decoder(config)  # the first one was taken apart
    speed_up(decoder.model, config.quantize)
    return decoder, GenerateLoop(decoder, config, clock)
