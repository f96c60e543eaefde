"""What does the next step compute?

One rule: every running sequence gets tokens until computed has caught up with known. Those that
wait for their next token come first, then pieces of prompts, to the step's token budget; what they
leave of it lets waiting sequences in, as long as the KV memory holds them. On shortage the youngest
is preempted and computed again later, from its stems. The oldest always goes on: alone, any
sequence of the model's context fits.

    plan = schedule.plan(budget)   # a Step
    ... the model computes it ...
    schedule.done(plan)
    schedule.append(sequence, token) or schedule.finish(sequence), for each piece that `samples`

A step that is small may compute guesses at what follows as well: those that come true are appended
as `guessed`, and the others forgotten.
"""

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from engine.plan.prefix import PrefixTree, Stem
from engine.plan.sequence import Lengths, Line, Sequence, in_order
from engine.plan.slots import Slot, Slots

# Tokens of told prompts in a step at most: the scores of each are as long as the vocabulary.
_TOLD = 64

Guessed = Mapping[Sequence, tuple[int, ...]]
"""Tokens that may follow what is known of a sequence."""
_NONE: Guessed = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Asked:
    """What the schedule is told of a request; `told` as of a Sequence."""

    id: Hashable
    prompt: tuple[int, ...]
    max_tokens: int
    told: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` tokens of one stem or sequence, whose first `before` own tokens are computed.

    `samples` says that the scores after its last known token are wanted, and after each of the
    `guesses` that it ends with. One that `tells` wants those after all its tokens.
    """

    strand: Stem | Sequence
    slot: Slot
    offset: int  # where in the slot the strand's own tokens begin
    before: int
    count: int
    samples: bool
    guesses: tuple[int, ...] = ()

    @property
    def scored(self) -> int:
        """How many of its last tokens have scores that are wanted."""
        return self.count if self.tells else self.samples + len(self.guesses)

    @property
    def tells(self) -> bool:
        """Whether it computes tokens of a prompt that are to be told how likely they were."""
        strand = self.strand
        if not isinstance(strand, Sequence) or not strand.told or strand.made:
            return False
        return self.before < len(strand.prompt) - 1

    @property
    def begin(self) -> int:
        """Position of its first token in the text."""
        return self.strand.start + self.before


@dataclass(frozen=True, slots=True)
class Move:
    """Copy the first `count` tokens of one slot to another, before the step's pieces."""

    source: Slot
    target: Slot
    count: int


@dataclass(slots=True)
class Step:
    """One forward: moves in order, then all pieces at once.

    `taken` are the other slots that are new to their holders; `too_large` sequences fit into no
    memory and have left the schedule.
    """

    left: int  # of the token budget
    untold: int = _TOLD  # tokens of told prompts for which there is room
    pieces: list[Piece] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    taken: list[Slot] = field(default_factory=list)
    too_large: list[Sequence] = field(default_factory=list)
    preempted: int = 0
    running: int = 0  # sequences, once it is planned
    full: bool = False  # whether more of them would not have fitted into budget or memory
    stems: dict[Stem, int] = field(default_factory=dict)  # tokens of each in `pieces`

    @property
    def tokens(self) -> int:
        """How many it computes."""
        return sum(piece.count for piece in self.pieces)


class Schedule:
    """The requests in flight, the slots they hold, and whose turn it is.

    At most `max_rows` sequences run; together with their stems they hold at most `limit` tokens of
    the memory, unless one alone needs more. Guesses fill a step up to `guess_rows` tokens.
    """

    def __init__(self, slots: Slots, *, limit: int, max_rows: int, guess_rows: int = 0) -> None:
        self._slots = slots
        self._limit = limit
        self._max_rows = max_rows
        self._guess_rows = guess_rows
        self._tree = PrefixTree(self._split)
        self._waiting = Line()
        self._running: list[Sequence] = []  # the oldest first
        self._sequences: dict[Hashable, Sequence] = {}
        self._idle: dict[Stem, None] = {}  # computed stems that no running sequence reads
        self._lengths = Lengths()

    @property
    def running(self) -> int:
        """Sequences that hold memory."""
        return len(self._running)

    @property
    def held(self) -> int:
        """Tokens of the memory that are in use."""
        return self._slots.held

    def reader(self, strand: Stem | Sequence) -> Sequence:
        """The running sequence that a strand was planned for; of a stem, its oldest reader."""
        if isinstance(strand, Sequence):
            return strand
        return next(sequence for sequence in self._running if strand in sequence.stems())

    def guessable(self) -> list[Sequence]:
        """The sequences for which the next step may have rows to spare."""
        if len(self._running) >= self._guess_rows:
            return []
        return [each for each in self._running if each.made and each.missing == 1]

    def add(self, group: Iterable[Asked]) -> None:
        """Take requests in; those of an earlier call are begun first."""
        arrived = []
        for asked in group:
            # The last token is never shared: its scores are wanted, not only its keys.
            node = self._tree.add(asked.prompt, 0 if asked.told else len(asked.prompt) - 1)
            sequence = Sequence(asked.id, asked.prompt, asked.max_tokens, node, told=asked.told)
            self._sequences[asked.id] = sequence
            arrived.append(sequence)
        ways = {sequence: self._tree.shared_way(sequence.node) for sequence in arrived}
        self._waiting.add(in_order(arrived, ways))

    def remove(self, ids: Collection[Hashable]) -> bool:
        """Drop these, waiting or running; whether any held memory."""
        dropped = [self._sequences[key] for key in ids if key in self._sequences]
        held = any(sequence.slot is not None for sequence in dropped)
        for sequence in dropped:
            self._leave(sequence)
        return held

    def plan(self, budget: int, guesses: Guessed = _NONE) -> Step:
        """Choose what to compute, and take the memory for it."""
        step = Step(left=budget)
        for sequence in tuple(self._running):
            if sequence.missing == 1 and sequence.made and step.left:
                self._decode(sequence, step)
        if all(self._prefill(sequence, step) for sequence in tuple(self._running)):
            self._let_in(step)
        self._fill_up(step, guesses)
        step.running = len(self._running)
        step.full |= not step.left
        return step

    def done(self, step: Step) -> None:
        """Its pieces are computed."""
        for piece in step.pieces:
            piece.strand.computed += piece.count - len(piece.guesses)

    def append(self, sequence: Sequence, token: int, *, guessed: bool = False) -> None:
        """The sequence goes on with this token; `guessed` if it is computed already."""
        sequence.made.append(token)
        sequence.computed += guessed

    def finish(self, sequence: Sequence) -> None:
        """The sequence has ended, with one token more than were appended."""
        self._lengths.add(len(sequence.made) + 1)
        self._leave(sequence)

    def _decode(self, sequence: Sequence, step: Step) -> None:
        """Let one token follow, in a larger slot if need be."""
        slot = sequence.slot
        if slot is None:  # preempted a moment ago, for an older one
            return
        if sequence.computed == slot.size and not self._grow(sequence, slot, step):
            return
        self._put(sequence, step)

    def _grow(self, sequence: Sequence, old: Slot, step: Step) -> bool:
        """Move a sequence to a larger slot; False where it is preempted itself."""
        while (new := self._slot_for(sequence, alone=len(self._running) == 1)) is None:
            youngest = self._running[-1]
            self._preempt(youngest, step)
            if youngest is sequence:
                return False
        step.moves.append(Move(old, new, sequence.computed))
        self._slots.release(old)
        sequence.slot = new
        return True

    def _prefill(self, sequence: Sequence, step: Step) -> bool:
        """Compute what is missing before the next token; whether the next sequence may follow.

        Stems first: in one step their keys are written before anybody's attention reads them.
        """
        if sequence.made and sequence.missing == 1:
            return True
        for stem in sequence.stems():
            if stem.missing and stem not in step.stems:
                self._put(stem, step)
            if step.stems.get(stem, 0) < stem.missing:
                return False
        self._put(sequence, step)
        return step.left > 0

    def _put(self, strand: Stem | Sequence, step: Step) -> None:
        """As many of its missing tokens as the budget has left."""
        count = min(strand.missing, step.left)
        if isinstance(strand, Sequence) and strand.told and not strand.made:
            count = min(count, step.untold)
            step.untold -= count
        if not count or strand.slot is None:
            return
        step.left -= count
        if isinstance(strand, Stem):
            offset, samples = strand.offset, False
            step.stems[strand] = count
        else:
            offset, samples = 0, count == strand.missing
        step.pieces.append(Piece(strand, strand.slot, offset, strand.computed, count, samples))

    def _fill_up(self, step: Step, guesses: Guessed) -> None:
        """Let a small step compute guesses too, as far as slots reach."""
        room = min(step.left, self._guess_rows - step.tokens)
        for place, piece in enumerate(step.pieces):
            strand = piece.strand
            if not isinstance(strand, Sequence) or not piece.samples or strand not in guesses:
                continue
            fits = min(piece.slot.size - piece.before - piece.count, strand.more - 1, room)
            guessed = guesses[strand][: max(0, fits)]
            step.pieces[place] = replace(piece, count=piece.count + len(guessed), guesses=guessed)
            step.left -= len(guessed)
            room -= len(guessed)

    def _let_in(self, step: Step) -> None:
        """Begin waiting sequences while there is budget, a row and memory for them."""
        while step.left and len(self._running) < self._max_rows:
            sequence = self._waiting.first()
            if sequence is None:
                return
            if self._seat(sequence, step):
                self._waiting.pop()
                self._running.append(sequence)
                if not self._prefill(sequence, step):
                    return
            elif self._running:
                step.full = True
                return
            else:
                self._leave(sequence)
                step.too_large.append(sequence)

    def _seat(self, sequence: Sequence, step: Step) -> bool:
        """Take the memory that a sequence begins with: for its stems, and for itself."""
        if self._seat_at(sequence, self._tree.stem_of(sequence.node), step):
            return True
        # Alone it may have all: then one slot for the whole of it wastes least.
        return not self._running and self._seat_at(sequence, None, step)

    def _seat_at(self, sequence: Sequence, stem: Stem | None, step: Step) -> bool:
        sequence.stem = stem
        sequence.start = 0 if stem is None else stem.end
        stems = sequence.stems()
        self._read(stems)
        taken: list[Stem] = []
        for above in stems:
            if above.slot is None:
                above.slot = self._room(above.end - above.start, alone=not self._running)
                if above.slot is None:
                    break
                above.offset = above.computed = 0
                taken.append(above)
        else:
            sequence.slot = self._slot_for(sequence, alone=not self._running)
        if sequence.slot is None:
            for above in taken:
                self._drop(above)
            self._unread(stems)
            sequence.stem = None
            sequence.start = 0
            return False
        sequence.computed = 0
        step.taken += [sequence.slot, *(above.slot for above in taken if above.slot is not None)]
        self._charge(sequence, stems)
        return True

    def _charge(self, sequence: Sequence, stems: list[Stem]) -> None:
        """The first sequence below a stem pays for it, whoever computes it how often."""
        cached = sum(stem.end - stem.start for stem in stems if stem.payer is not None)
        for stem in stems:
            stem.payer = sequence.id if stem.payer is None else stem.payer
        if sequence.cached is None:
            sequence.cached = cached

    def _slot_for(self, sequence: Sequence, *, alone: bool) -> Slot | None:
        """A slot for a sequence's own tokens, and for as many more as its answer may well have.

        For all that it may have, where an equal share of what is free has room for them; one that
        was preempted has them too, so that it need not move again.
        """
        own = sequence.known - sequence.start
        share = (self._limit - self._slots.held) // max(1, self._max_rows - len(self._running))
        whole = sequence.preempted or self._slots.rounded(own + sequence.more) <= share
        more = sequence.more if whole else self._lengths.usual(sequence.more)
        return self._room(own + more, alone=alone)

    def _room(self, length: int, *, alone: bool) -> Slot | None:
        """A slot, after dropping stems that nobody reads now if need be."""
        size = self._slots.rounded(length)
        while True:
            if alone or self._slots.held + size <= self._limit:
                slot = self._slots.take(length)
                if slot is not None:
                    return slot
            if not self._idle:
                return None
            self._drop(next(iter(self._idle)))

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Let a sequence wait again, with the tokens it has made; it comes before all others."""
        self._stand_up(sequence)
        sequence.preempted = True
        self._waiting.put_back(sequence)
        step.preempted += 1

    def _leave(self, sequence: Sequence) -> None:
        """Forget a sequence; stems that it was the last to need go with it."""
        if sequence.slot is not None:
            self._stand_up(sequence)
        sequence.gone = True  # should it wait, it is passed over
        del self._sequences[sequence.id]
        for stem in self._tree.remove(sequence.node):
            self._drop(stem)

    def _stand_up(self, sequence: Sequence) -> None:
        """Give back a running sequence's own slot, and read its stems no more."""
        if sequence.slot is not None:
            self._slots.release(sequence.slot)
        self._unread(sequence.stems())
        self._running.remove(sequence)
        sequence.slot = sequence.stem = None
        sequence.start = sequence.computed = 0

    def _read(self, stems: Iterable[Stem]) -> None:
        for stem in stems:
            stem.runners += 1
            self._idle.pop(stem, None)

    def _unread(self, stems: Iterable[Stem]) -> None:
        for stem in stems:
            stem.runners -= 1
            if not stem.runners and stem.slot is not None:
                self._idle[stem] = None

    def _split(self, upper: Stem, lower: Stem) -> None:
        """A stem became two: both hold the slot that was one's."""
        if upper.slot is not None:
            self._slots.share(upper.slot)
        if lower in self._idle:
            self._idle[upper] = None

    def _drop(self, stem: Stem) -> None:
        """Forget a stem's keys and values; they are computed anew if somebody needs them again."""
        self._idle.pop(stem, None)
        if stem.slot is not None:
            self._slots.release(stem.slot)
        stem.slot = None
        stem.offset = stem.computed = 0
