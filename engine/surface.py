"""What does every engine offer? The real one, and the stub that stands in for it.

An engine belongs to one thread: whoever shares it hands requests over by a queue.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

from engine.calls import CallForm
from engine.request import Request, Result


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine did since it started.

    `requests` were answered, `failures` of them with a Failure; `input_tokens` and `output_tokens`
    are those of the answers. `padded_tokens` went through the model, padding and repeated work
    included, as `rows` sequences in `steps` steps. `twins` were answered by what another request
    had computed. `out_of_memory` counts batches that were cut smaller, `non_finite` rows that were
    run again in float32. `prefill_tokens` are those of prompts and of answers computed again,
    `decode_tokens` went through the model one by one for their answer's next; `cached_tokens` of
    prompts were read from what others had computed; `preempted` counts answers that had to wait in
    the middle for memory. Of the decode tokens `guessed_tokens` were guesses, and `guessed_right`
    of these came true.

    `running` sums over the steps how many sequences ran, `seats` how many could have: as many as
    did where the token budget or the memory was full, else `max_sequences`.
    """

    requests: int = 0
    failures: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    padded_tokens: int = 0
    steps: int = 0
    rows: int = 0
    twins: int = 0
    out_of_memory: int = 0
    non_finite: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    preempted: int = 0
    guessed_tokens: int = 0
    guessed_right: int = 0
    running: int = 0
    seats: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        """Both, field by field."""
        return Counters(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            }
        )


@dataclass(frozen=True, slots=True)
class Status:
    """How an engine runs its model, as it found at load and has learnt since.

    `path` is "packed" where no padding is computed, "padded" where the model's own code needs
    batches in rectangles, "stub" where nothing is. `same_bytes` says whether a probe at load found
    that neighbours change no bit of a result. `token_budget` bounds a step now; `memory_bytes` is
    what the device holds for it at most so far, where the device can tell. `kv_held` of at most
    `kv_tokens` tokens of the KV memory are in use now, where there is one; then `seats` sequences
    run at once at most, and leave one by one.
    """

    path: str
    same_bytes: bool
    token_budget: int
    memory_bytes: int | None = None
    kv_held: int | None = None
    kv_tokens: int | None = None
    seats: int | None = None


class EngineLike(Protocol):
    """Requests in, results out."""

    @property
    def pending(self) -> int:
        """Requests submitted and not yet answered."""
        ...

    @property
    def counters(self) -> Counters:
        """What was done so far."""
        ...

    @property
    def dimensions(self) -> int | None:
        """Length of the vectors; None for a model that makes none."""
        ...

    @property
    def smaller_dimensions(self) -> tuple[int, ...]:
        """Lengths that the vectors may be cut to, ascending; empty for a model that lists none."""
        ...

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of what it scores, in the order of the logits; empty for a model without labels."""
        ...

    @property
    def status(self) -> Status:
        """How it runs."""
        ...

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence, its answer included."""
        ...

    def submit(self, requests: Iterable[Request]) -> None:
        """Take requests in. A bad one gets its Failure from the next step; a duplicate id raises.

        Requests of one call may run in any order; an earlier call's are begun first.
        """
        ...

    def step(self) -> list[Result]:
        """Do one bounded piece of work and return what is finished by it, in any order."""
        ...

    def abort(self, ids: Iterable[Hashable]) -> None:
        """Drop these requests, running or not, without a result; unknown ids are passed over."""
        ...

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
        """Submit all and yield each one's index and result, as they finish."""
        ...


class Pair(NamedTuple):
    """Two texts as one sequence; `first` of its tokens belong to the first."""

    tokens: list[int]
    first: int


class Window(NamedTuple):
    """A piece of a long text with special tokens, and each token's characters: `start`, `end` in
    the whole text; both 0 for a special token."""

    tokens: list[int]
    spans: list[tuple[int, int]]


class TokenizerLike(Protocol):
    """Text to token ids and back, in a model's own way."""

    def __hash__(self) -> int:
        """What was found with it may be kept under it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to below this."""
        ...

    @property
    def context_length(self) -> int | None:
        """Most tokens of a text, as the model's own files say; None where they do not."""
        ...

    @property
    def prompts(self) -> Mapping[str, str]:
        """What may be put before a text, by name: the model's own files, then the catalog."""
        ...

    def encode(
        self, texts: Sequence[str], *, prompt_name: str | None = None, limit: int | None = None
    ) -> list[list[int]]:
        """Ids of each text with special tokens; cut to `limit` tokens, those included, or whole.

        Without a `prompt_name` the model's default prompt, if it has one, stands before each text.
        """
        ...

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, limit: int | None = None
    ) -> list[Pair]:
        """Each pair as one sequence with special tokens; cut to `limit`, the longer text first."""
        ...

    def encode_windows(self, text: str, *, limit: int, overlap: int) -> list[Window]:
        """The text as pieces of at most `limit` tokens, neighbours sharing `overlap` of them."""
        ...

    def continues(self, text: str, window: Window) -> list[bool]:
        """Which tokens of a window of that text go on with the word of the token before them."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a plain completion's prompt."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what `render_chat` made, which holds its special tokens already."""
        ...

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text; None where the model's files name none."""
        ...

    @property
    def calls(self) -> CallForm | None:
        """How the chat template writes calls of tools; None where it has no place for them."""
        ...

    def render_chat(
        self, messages: list[dict[str, Any]], *, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        """The messages as the model's chat template writes them, up to where the answer begins."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for, which may be a part of a character."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these ids."""
        ...


def drive(engine: EngineLike, requests: Iterable[Request]) -> Iterator[tuple[int, Result]]:
    """`run` of every engine: needs an idle one, leaves it idle however the loop over it ends."""
    waiting = engine.pending
    if waiting:
        msg = f"run needs an idle engine; {waiting} requests are pending"
        raise ValueError(msg)
    ordered = list(requests)
    index = {request.id: position for position, request in enumerate(ordered)}
    engine.submit(ordered)
    try:
        while engine.pending:
            for result in engine.step():
                yield index[result.id], result
    finally:
        engine.abort(index)
