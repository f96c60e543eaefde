"""When is an answer finished, and what does it say?"""

from collections.abc import Collection

from engine.generate.sampler import Draw
from engine.generate.stops import StopWatch, cut
from engine.request import FinishReason, GenerateRequest, Generation
from engine.surface import TokenizerLike


class Answer:
    """One request's answer while it grows, token by token."""

    def __init__(
        self, request: GenerateRequest, tokenizer: TokenizerLike, eos_ids: Collection[int]
    ) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._token_ids: list[int] = []
        stop = request.sampling.stop
        self._watch = StopWatch(tokenizer.decode, stop) if stop else None

    def next_draw(self) -> Draw:
        """How the next token is to be chosen."""
        return Draw(self.request.sampling, self.request.choice, step=len(self._token_ids))

    def take(self, token: int) -> Generation | None:
        """Add a token; the finished answer, if this token ends it."""
        self._token_ids.append(token)
        ended = token in self._eos_ids
        full = len(self._token_ids) >= self.request.sampling.max_tokens
        if not (ended or full or (self._watch is not None and self._watch.push(token))):
            return None
        written = self._token_ids[:-1] if ended else self._token_ids
        text, stopped = cut(self._tokenizer.decode(written), self.request.sampling.stop)
        if not (ended or full or stopped):
            return None
        return self._finish(text, FinishReason.STOP if ended or stopped else FinishReason.LENGTH)

    def _finish(self, text: str, reason: FinishReason) -> Generation:
        return Generation(
            id=self.request.id,
            text=text,
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            input_tokens=len(self.request.prompt),
            cached_tokens=0,
            output_tokens=len(self._token_ids),
        )
