"""When is an answer finished, and what does it say?"""

from collections.abc import Hashable, Sequence

from torch import Tensor

from engine.generate.sampling.adjust import Draw, Seen
from engine.generate.sampling.pick import Pick, pick, told
from engine.generate.stops import StopWatch, cut
from engine.model.grammar import GrammarError, Guide
from engine.model.load import Decoder
from engine.request import (
    Failure,
    FailureReason,
    FinishReason,
    GenerateRequest,
    Generation,
    TokenLogprob,
)


def extend(answers: Sequence["Answer"], scores: Tensor) -> list[int | Generation | Failure]:
    """What comes of float32 scores [answers, vocab]: for each its next token, or how it ended."""
    if not answers:
        return []
    picks = pick(scores, [answer.next_draw() for answer in answers])
    return [answer.take(picked) for answer, picked in zip(answers, picks, strict=True)]


class Answer:
    """One request's answer while it grows, token by token; small as long as it waits.

    The request's grammar is one that compiles.
    """

    def __init__(self, request: GenerateRequest, decoder: Decoder) -> None:
        self.request = request
        sampling = request.sampling
        self._decoder = decoder
        self._decode = decoder.tokenizer.decode
        self._ends = sorted(decoder.eos_ids)
        self._token_ids: list[int] = []
        self._watch = StopWatch(self._decode, sampling.stop) if sampling.stop else None
        self._seen: Seen | None = None
        self._guide: Guide | None = None
        self._logprobs: list[TokenLogprob] = []
        self._candidates: tuple[float, ...] = ()
        self._told: dict[int, TokenLogprob | None] = {}  # by position in the prompt

    def next_draw(self) -> Draw:
        """How the next token is to be chosen."""
        if not self._token_ids:
            self._begin()
        return Draw(
            self.request.sampling,
            self.request.choice,
            step=len(self._token_ids),
            ends=self._ends,
            seen=self._seen,
            guide=self._guide,
        )

    def tell(self, begin: int, scores: Tensor) -> None:
        """What the prompt goes on with was how likely? float32 [tokens from `begin` on, vocab]."""
        follow = self.request.prompt[begin + 1 : begin + 1 + len(scores)]
        found = told(scores, follow, self.request.sampling.prompt_logprobs or 0)
        self._told.update(enumerate(found, begin + 1))

    def forced(self) -> tuple[int, ...]:
        """Tokens of the text that its grammar leaves no choice about; others may write it too."""
        return self._guide.forced() if self._guide is not None else ()

    def take(self, picked: Pick | None) -> int | Generation | Failure:
        """Add a token: it, if the answer goes on with it; the finished answer, if it ends it.

        None, for scores that are not finite, fails it; so does a grammar that can go no further.
        """
        if picked is None or not all(self._told.values()):
            return self._fail()
        self._note(picked)
        sampling, token = self.request.sampling, picked.token
        ended = token in self._decoder.eos_ids and not sampling.ignore_eos
        if not ended and self._guide is not None:
            try:
                self._guide.accept(token)
            except GrammarError as error:
                return unfollowed(self.request.id, error)
        spelled = self._guide is not None and self._guide.ended
        full = len(self._token_ids) >= sampling.max_tokens
        seen = self._watched(token)
        if not (ended or spelled or full or seen):
            return token
        written = self._token_ids[:-1] if ended else self._token_ids
        text, stopped = cut(self._decode(written), sampling.stop, self._stops_from(written))
        if not (ended or spelled or full or stopped):
            return token
        stop = ended or spelled or stopped
        return self._finish(text, FinishReason.STOP if stop else FinishReason.LENGTH)

    def _begin(self) -> None:
        """Make ready what an answer needs once it runs."""
        sampling = self.request.sampling
        self._seen = Seen.of(self.request.prompt, sampling)
        if sampling.grammar is not None:
            self._guide = self._decoder.grammars.guide(sampling.grammar)

    def _note(self, picked: Pick) -> None:
        self._token_ids.append(picked.token)
        if self._seen is not None:
            self._seen.add(picked.token)
        if picked.logprob is not None:
            self._logprobs.append(picked.logprob)
        if picked.candidates:
            self._candidates = picked.candidates

    def _watched(self, token: int) -> bool:
        """Whether a stop string seems to stand in the text now."""
        if self._watch is None:
            return False
        if len(self._token_ids) <= self.request.sampling.min_tokens:
            self._watch.skip(token)
            return False
        return self._watch.push(token)

    def _stops_from(self, written: Sequence[int]) -> int:
        """From which character on stop strings count."""
        least = self.request.sampling.min_tokens
        if not (least and self._watch):
            return 0
        # A character whose end is yet to come counts as what follows.
        return len(self._decode(written[:least]).rstrip("\ufffd"))

    def _finish(self, text: str, reason: FinishReason) -> Generation:
        asked = self.request.sampling.logprobs is not None
        return Generation(
            id=self.request.id,
            text=text,
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            input_tokens=len(self.request.prompt),
            cached_tokens=0,
            output_tokens=len(self._token_ids),
            logprobs=tuple(self._logprobs) if asked else None,
            candidates=self._candidates,
            prompt_logprobs=self._of_prompt(),
        )

    def _of_prompt(self) -> tuple[TokenLogprob, ...] | None:
        if self.request.sampling.prompt_logprobs is None:
            return None
        in_order = sorted(self._told.items())
        return tuple(each for _, each in in_order if each is not None)

    def _fail(self) -> Failure:
        if self._guide is not None and self._guide.fault is not None:
            return unfollowed(self.request.id, self._guide.fault)
        message = "The model's scores for this input are not finite."
        return Failure(self.request.id, FailureReason.NON_FINITE, message)


def unfollowed(key: Hashable, fault: GrammarError) -> Failure:
    """What becomes of a request whose grammar cannot be followed."""
    message = f"The grammar cannot be followed: {fault}"
    return Failure(key, FailureReason.INVALID, message, "grammar")
