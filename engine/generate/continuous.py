"""How do prompts become answers? Every step computes what each running sequence lacks.

Sequences begin as soon as there is memory for them and leave as soon as they end; prompts in flight
are computed once where they are alike. (Models that this does not suit: engine.generate.padded.)
"""

import time
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import count, groupby
from operator import itemgetter
from typing import assert_never

from torch import Tensor

from engine.config import EngineConfig
from engine.generate.accounts import Accounts, Share
from engine.generate.answer import Answer, extend
from engine.generate.forward import PackedForward
from engine.generate.guesses import Guesses
from engine.generate.span_forward import SpanForward
from engine.memory import is_out_of_memory, release
from engine.model.load import Decoder
from engine.outcome import Outcome
from engine.plan.budget import Budget
from engine.plan.prefix import Stem
from engine.plan.schedule import Asked, Guessed, Schedule, Step
from engine.plan.sequence import Sequence
from engine.plan.slots import Slots
from engine.request import (
    Failure,
    FailureReason,
    GenerateRequest,
    Generation,
    Result,
    Sampling,
    Work,
)
from engine.surface import Counters

# Requests that are equal in these have equal answers: draws are keyed by seed and choice.
_Twin = tuple[tuple[int, ...], Sampling, int]


@dataclass(eq=False, slots=True)
class _Job:
    """One sequence, and the requests that it answers."""

    twin: _Twin
    requests: dict[Hashable, GenerateRequest]
    answer: Answer
    guesses: Guesses | None = None  # there once one was asked for


class ContinuousLoop:
    """Takes generate requests in and computes one step of them at a time."""

    def __init__(
        self,
        decoder: Decoder,
        forward: PackedForward | SpanForward,
        tokens: int,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._decoder = decoder
        self._forward = forward
        self._budget = Budget.of(config.prefill_tokens)
        # A CUDA device's memory is the engine's own: all of it may be held.
        self.kv_tokens = config.cache_tokens if decoder.device.type == "cpu" else tokens
        # On a CUDA device, steps with guesses could not be replayed from a graph.
        self._guess_rows = config.guess_rows if decoder.device.type == "cpu" else 0
        self._schedule = Schedule(
            Slots(tokens),
            limit=self.kv_tokens,
            max_rows=config.max_sequences,
            guess_rows=self._guess_rows,
        )
        self._max_rows = config.max_sequences
        self._accounts = Accounts(clock)
        self._serials = count()
        self._jobs: dict[Hashable, _Job] = {}
        self._job_of: dict[Hashable, int] = {}
        self._twins: dict[_Twin, int] = {}
        self._failing: Sequence | None = None  # what ran out of memory with a single token
        # Whether some slot may hold numbers that are not finite, as it does after such a failure.
        self._wipe = False

    @property
    def kv_held(self) -> int:
        """Tokens of the KV memory that are in use."""
        return self._schedule.held

    def add(self, requests: Iterable[GenerateRequest]) -> None:
        """Take in requests that were found fit to run."""
        fresh = []
        for request in requests:
            twin = (request.prompt, request.sampling, request.choice)
            serial = self._twins.get(twin)
            if serial is None:
                serial = next(self._serials)
                answer = Answer(request, self._decoder)
                self._jobs[serial] = _Job(twin, {}, answer)
                self._twins[twin] = serial
                sampling = request.sampling
                told = sampling.prompt_logprobs is not None
                fresh.append(Asked(serial, request.prompt, sampling.max_tokens, told))
            self._jobs[serial].requests[request.id] = request
            self._job_of[request.id] = serial
        if fresh:
            self._schedule.add(fresh)

    def remove(self, ids: Collection[Hashable]) -> None:
        """Forget these requests, waiting or running."""
        for key in ids:
            serial = self._job_of.pop(key, None)
            if serial is None:
                continue
            job = self._jobs[serial]
            del job.requests[key]
            if not job.requests:
                self._forget(serial)
                # Nobody looked at its scores: they may not have been finite.
                self._wipe |= self._schedule.remove([serial])

    def step(self) -> Outcome:
        """Compute a piece of prompts, and the next token of every answer that waits for one."""
        began = self._accounts.clock()
        step = self._schedule.plan(self._budget.current, self._guesses())
        results: list[Result] = []
        for sequence in step.too_large:
            results += self._fail(sequence, _too_large)
        if not step.pieces:
            return Outcome(tuple(results))
        found = self._try(step)
        if found is None:
            return Outcome((*results, *self._cut_smaller(step)), Counters(out_of_memory=1))
        self._schedule.done(step)
        self._budget = self._budget.after_success()
        self._failing = None
        cost = _cost(step, self._max_rows)
        answered, right = self._extend(step, began, *found)
        return Outcome(
            (*results, *answered), cost + _saved(answered) + Counters(guessed_right=right)
        )

    def _guesses(self) -> Guessed:
        """What may follow in answers, where the next step has rows to spare."""
        guessed = {}
        sequences = self._schedule.guessable()
        for sequence in sequences:
            job = self._job(sequence)
            job.guesses = job.guesses or Guesses(sequence.prompt)
            most = self._guess_rows // len(sequences)
            told = job.answer.forced() or job.guesses.next(sequence.made, most)
            guessed[sequence] = told[:most]
        return guessed

    def _try(self, step: Step) -> tuple[list[Sequence], Tensor] | None:
        """Whose next token is wanted, and its scores; None where the memory did not suffice."""
        self._forward.prepare(step, wipe=self._wipe)
        try:
            return self._forward(step)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return None

    def _extend(
        self, step: Step, began: float, sequences: list[Sequence], scores: Tensor
    ) -> tuple[list[Result], int]:
        """Give each answer its next token, and one more for each guess that came true.

        The results of those that are finished by it, and how many guesses came true.
        """
        guesses = {
            piece.strand: piece.guesses
            for piece in step.pieces
            if isinstance(piece.strand, Sequence) and piece.guesses
        }
        found = self._next_tokens(*self._tell(step, sequences, scores), guesses)
        self._accounts.note(_shares(step), [sequence.id for sequence in found], began)
        results: list[Result] = []
        right = 0
        for sequence, extended in found.items():
            guessed = guesses.get(sequence, ())
            right += len(extended) - 1
            if guessed:
                self._learn(sequence, len(guessed), len(extended) - 1)
            for place, each in enumerate(extended):
                match each:
                    case int():
                        known = place < len(guessed) and each == guessed[place]
                        self._schedule.append(sequence, each, guessed=known)
                    case Generation():
                        self._schedule.finish(sequence)
                        results += self._answer(sequence, each)
                    case Failure():
                        self._wipe |= each.reason is FailureReason.NON_FINITE
                        self._schedule.finish(sequence)
                        results += [
                            replace(each, id=key) for key in self._forget(sequence.id).requests
                        ]
                    case unreachable:
                        assert_never(unreachable)
        return results, right

    def _tell(
        self, step: Step, sequences: list[Sequence], scores: Tensor
    ) -> tuple[list[Sequence], Tensor]:
        """Note how likely the tokens of told prompts were; the rows that are left."""
        telling = {piece.strand: piece for piece in step.pieces if piece.tells}
        if not telling:
            return sequences, scores
        left: list[int] = []
        for sequence, own in groupby(enumerate(sequences), key=itemgetter(1)):
            rows = [row for row, _ in own]
            piece = telling.get(sequence)
            if piece is not None:
                count = len(rows) - piece.samples
                self._job(sequence).answer.tell(piece.begin, scores[rows[:count]])
                rows = rows[count:]
            left += rows
        return [sequences[row] for row in left], scores[left]

    def _next_tokens(
        self, sequences: Iterable[Sequence], scores: Tensor, guesses: Guessed
    ) -> dict[Sequence, list[int | Generation | Failure]]:
        """What comes of the scores of each sequence: row after row, as long as guesses are right.

        Row by row, so that an answer's penalties, grammar and draws are those of one without.
        """
        rows: dict[Sequence, list[int]] = {}
        for row, sequence in enumerate(sequences):
            rows.setdefault(sequence, []).append(row)
        found: dict[Sequence, list[int | Generation | Failure]] = {each: [] for each in rows}
        going, turn = list(rows), 0
        while going:
            answers = [self._job(sequence).answer for sequence in going]
            own = scores
            if len(going) < len(scores):
                own = scores[[rows[sequence][turn] for sequence in going]]
            for sequence, each in zip(going, extend(answers, own), strict=True):
                found[sequence].append(each)
            going = [
                sequence
                for sequence in going
                if guesses.get(sequence, ())[turn : turn + 1] == (found[sequence][-1],)
            ]
            turn += 1
        return found

    def _learn(self, sequence: Sequence, guessed: int, right: int) -> None:
        guesses = self._job(sequence).guesses
        if guesses is not None:
            guesses.learn(guessed, right, len(sequence.made))

    def _answer(self, sequence: Sequence, generation: Generation) -> list[Result]:
        """One answer for each request that asked for it; the first pays for the prompt."""
        work = self._accounts.close(sequence.id, preempted=sequence.preempted)
        job = self._forget(sequence.id)
        results: list[Result] = []
        for place, key in enumerate(job.requests):
            cached = (sequence.cached or 0) if place == 0 else generation.input_tokens - 1
            own = work if place == 0 else Work()
            results.append(replace(generation, id=key, cached_tokens=cached, work=own))
        return results

    def _fail(
        self, sequence: Sequence, failure: Callable[[GenerateRequest], Failure]
    ) -> list[Result]:
        return [failure(request) for request in self._forget(sequence.id).requests.values()]

    def _cut_smaller(self, step: Step) -> list[Result]:
        """Let the next steps be smaller; a token that fails twice alone fails its request.

        Nothing was counted as computed, so the next plan begins where this one did.
        """
        release(self._decoder.device)
        self._budget = self._budget.after_out_of_memory(step.tokens)
        if step.tokens > 1:
            return []
        [piece] = step.pieces
        sequence = self._schedule.reader(piece.strand)
        if self._failing is not sequence:
            self._failing = sequence
            return []
        self._failing = None
        self._budget = self._budget.after_blame()
        self._schedule.remove([sequence.id])
        return self._fail(sequence, _too_large)

    def _job(self, sequence: Sequence) -> _Job:
        return self._jobs[sequence.id]

    def _forget(self, key: Hashable) -> _Job:
        self._accounts.drop(key)
        job = self._jobs.pop(key)
        del self._twins[job.twin]
        for request in job.requests:
            self._job_of.pop(request, None)
        return job


def _shares(step: Step) -> list[Share]:
    """Whose tokens it computed: a stem's are those of the first sequence that reads it."""
    return [
        (
            piece.strand.payer if isinstance(piece.strand, Stem) else piece.strand.id,
            piece.count,
        )
        for piece in step.pieces
    ]


def _cost(step: Step, max_rows: int) -> Counters:
    """What a step computed; asked before its answers grow."""
    decoded = sum(
        piece.scored
        for piece in step.pieces
        if piece.scored == piece.count and isinstance(piece.strand, Sequence) and piece.strand.made
    )
    return Counters(
        padded_tokens=step.tokens,
        rows=len(step.pieces),
        prefill_tokens=step.tokens - decoded,
        decode_tokens=decoded,
        guessed_tokens=sum(len(piece.guesses) for piece in step.pieces),
        preempted=step.preempted,
        running=step.running,
        seats=step.running if step.full else max_rows,
    )


def _saved(results: Iterable[Result]) -> Counters:
    """What these answers had from others."""
    answers = [result for result in results if isinstance(result, Generation)]
    return Counters(cached_tokens=sum(answer.cached_tokens for answer in answers))


def _too_large(request: GenerateRequest) -> Failure:
    tokens = len(request.prompt) + request.sampling.max_tokens
    message = f"A request of {tokens} tokens (max_tokens included) does not fit into memory."
    return Failure(request.id, FailureReason.OUT_OF_MEMORY, message)
