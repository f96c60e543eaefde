"""Which tokens may follow, where an answer has to be a text of a grammar?

llguidance compiles grammars and knows which tokens of the model's own tokenizer they allow.
"""

from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import assert_never

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from engine.request import JSON_SPACE, Grammar, GrammarKind
from engine.tokenizer import Tokenizer

_KEPT = 256  # compiled grammars; a file rarely has more
_THREADS = 8


class GrammarError(Exception):
    """The grammar cannot be followed; the message is fit for the client."""


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """A grammar before its first token, and which tokens that may be."""

    matcher: LLMatcher
    mask: NDArray[np.int32]  # [1, vocab / 32]


class Grammars:
    """Compiles grammars for one model. Belongs to the engine's thread."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: Collection[int]) -> None:
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._compiled = lru_cache(_KEPT)(self._compile)

    def check(self, grammar: Grammar) -> None:
        """Compile it, once. Raises GrammarError."""
        self._compiled(grammar)

    def guide(self, grammar: Grammar) -> "Guide":
        """To follow it in one answer. Raises GrammarError where it does not compile."""
        compiled = self._compiled(grammar)
        return Guide(compiled.matcher.deep_copy(), compiled.mask.copy(), self._threads)

    def _compile(self, grammar: Grammar) -> _Compiled:
        try:
            matcher = LLMatcher(self._tokenizer, _written(grammar), log_level=0)
        except ValueError as error:
            raise _fault(str(error)) from error
        mask = allocate_token_bitmask(1, self._vocab_size)
        if not matcher.is_error():
            fill_next_token_bitmask(matcher, mask)
        if matcher.is_error():
            raise _fault(matcher.get_error())
        return _Compiled(matcher, mask)

    # Both only once a grammar comes: most models never see one.
    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        return LLTokenizer(
            self._source.to_json(), n_vocab=self._vocab_size, eos_token=self._eos_ids
        )

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")


class Guide:
    """One answer's way through its grammar.

    What may follow is computed beside the model's forward, as soon as a token is known.
    """

    def __init__(
        self, matcher: LLMatcher, mask: NDArray[np.int32], threads: ThreadPoolExecutor
    ) -> None:
        self._matcher = matcher
        self._mask = mask
        self._threads = threads
        self._filling: Future[None] | None = None
        self.ended = False  # nothing but the end can follow

    def barred(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens cannot follow, [vocab]; all of them where there is a fault."""
        if self.fault is not None:
            return np.ones(vocab_size, dtype=np.bool_)
        allowed = np.unpackbits(self._mask.view(np.uint8)[0], bitorder="little")
        barred: NDArray[np.bool_] = allowed[:vocab_size] == 0
        return barred

    def accept(self, token: int) -> None:
        """The answer goes on with this token. Raises GrammarError where it cannot."""
        self._wait()
        if not self._matcher.consume_token(token):
            raise _fault(self._matcher.get_error())
        self.ended = self._matcher.is_stopped()
        if not self.ended:
            self._filling = self._threads.submit(fill_next_token_bitmask, self._matcher, self._mask)

    def forced(self) -> tuple[int, ...]:
        """The tokens that must follow, as the model's tokenizer writes their text."""
        self._wait()
        return tuple(self._matcher.compute_ff_tokens())

    @property
    def fault(self) -> GrammarError | None:
        """Why it can be followed no further, if so: what may follow was too much to compute."""
        self._wait()
        return _fault(self._matcher.get_error()) if self._matcher.is_error() else None

    def _wait(self) -> None:
        filling, self._filling = self._filling, None
        if filling is not None:
            filling.result()


def _written(grammar: Grammar) -> str:
    """As llguidance reads it."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(
                grammar.text, defaults={"whitespace_pattern": JSON_SPACE}
            )
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)
        case unreachable:
            assert_never(unreachable)


def _fault(message: str) -> GrammarError:
    # What follows the first line shows places and the state of the parser, but for a reason.
    first, *others = message.strip().splitlines() or ["its text cannot be computed."]
    reasons = [other.removeprefix("error: ") for other in others if other.startswith("error: ")]
    return GrammarError(" ".join([first, *reasons]))
