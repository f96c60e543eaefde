"""Does the schedule keep its books, share rightly, and always get on?

The model is replaced by a memory that stores, for each token computed, the whole text up to it. A
piece that reads anything but its own text before it has read another's keys.
"""

import sys
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.plan.prefix import Stem
from engine.plan.schedule import Asked, Piece, Schedule, Step
from engine.plan.sequence import Sequence
from engine.plan.slots import Slot, Slots, slab_size


class Memory:
    """What a model would have written where: the text up to each token, itself included."""

    def __init__(self, tokens: int) -> None:
        self.cells: list[tuple[int, ...] | None] = [None] * tokens

    def run(self, step: Step) -> None:
        for move in step.moves:
            source, target = move.source.start, move.target.start
            self.cells[target : target + move.count] = self.cells[source : source + move.count]
        for piece in step.pieces:
            text = (*text_of(piece.strand), *piece.guesses)
            for position in range(piece.begin, piece.begin + piece.count):
                place = position - piece.strand.start + piece.offset
                assert place < piece.slot.size
                self.cells[piece.slot.start + place] = text[: position + 1]
        for piece in step.pieces:
            self._check_reads(piece)

    def _check_reads(self, piece: Piece) -> None:
        text = (*text_of(piece.strand), *piece.guesses)
        end = piece.begin + piece.count
        above = piece.strand.stems() if isinstance(piece.strand, Sequence) else []
        if isinstance(piece.strand, Stem):
            above = piece.strand.way_down()[:-1]
        spans = [(s.slot, s.offset, s.start, s.end) for s in above]
        spans.append((piece.slot, piece.offset, piece.strand.start, end))
        expected = 0
        for slot, offset, start, stop in spans:
            assert slot is not None
            assert start == expected  # nothing left out, nothing twice
            for position in range(start, stop):
                assert self.cells[slot.start + offset + position - start] == text[: position + 1]
            expected = stop


def text_of(strand: Stem | Sequence) -> tuple[int, ...]:
    if isinstance(strand, Stem):
        return strand.tokens[: strand.end]
    return (*strand.prompt, *strand.made)


def stems_of(schedule: Schedule) -> list[Stem]:
    stems, nodes = [], [schedule._tree._root]
    while nodes:
        node = nodes.pop()
        nodes += node.children.values()
        if node.stem is not None:
            stems.append(node.stem)
    return stems


def check_books(schedule: Schedule, slots: Slots) -> None:
    holders = dict(slots.holders)
    covered: set[int] = set()
    for slot in holders:
        tokens = set(range(slot.start, slot.start + slot.size))
        assert not tokens & covered
        covered |= tokens
    assert slots.held == len(covered)
    assert max(covered, default=0) < slots.total
    counted: dict[Slot, int] = {}
    for holder in [*schedule._running, *stems_of(schedule)]:
        if holder.slot is not None:
            counted[holder.slot] = counted.get(holder.slot, 0) + 1
    assert counted == holders
    for stem in stems_of(schedule):
        reading = sum(stem in sequence.stems() for sequence in schedule._running)
        assert stem.runners == reading
        assert (stem in schedule._idle) == (stem.slot is not None and not reading)
        assert stem.slot is not None or stem.computed == 0


PARTS = st.lists(st.integers(0, 3), min_size=0, max_size=3)


@settings(max_examples=120, stateful_step_count=60, deadline=None)
class Books(RuleBasedStateMachine):
    """Requests come, run, end and are dropped in any order."""

    @initialize(
        tokens=st.sampled_from([96, 384, 1000]),
        share=st.sampled_from([0.2, 0.6, 1.0]),
        rows=st.integers(1, 6),
        guess_rows=st.sampled_from([0, 4, 30]),
    )
    def start(self, tokens: int, share: float, rows: int, guess_rows: int) -> None:
        self.slots = Slots(tokens)
        self.memory = Memory(self.slots.total)
        limit = int(tokens * share)
        self.schedule = Schedule(self.slots, limit=limit, max_rows=rows, guess_rows=guess_rows)
        self.rows = rows
        self.pending: dict[Hashable, int] = {}  # tokens still to come
        self.number = 0

    @rule(parts=st.lists(st.tuples(PARTS, st.integers(1, 24), st.integers(1, 20)), max_size=5))
    def add(self, parts: list[tuple[list[int], int, int]]) -> None:
        group = []
        for shared, own, more in parts:
            # Parts of 17 tokens that others may have too, then some that only twins have.
            prompt = tuple(10 * part + place % 3 for part in shared for place in range(17))
            prompt += tuple(100 + own for _ in range(own))
            if len(prompt) + more <= 90:
                group.append(Asked(self.number, prompt, more, told=own % 4 == 0))
                self.pending[self.number] = more
                self.number += 1
        self.schedule.add(group)

    @precondition(lambda self: self.pending)
    @rule(
        budget=st.sampled_from([1, 7, 40, 300]),
        ending=st.sets(st.integers(0, 5)),
        guessed=st.integers(0, 9),
        right=st.integers(0, 9),
    )
    def step(self, budget: int, ending: set[int], guessed: int = 0, right: int = 0) -> None:
        """The first `right` of so many guesses at each sequence come true."""
        guesses = dict.fromkeys(self.schedule.guessable(), (7,) * guessed)
        step = self.schedule.plan(budget, guesses)
        assert step.tokens > 0  # progress is certain
        assert step.tokens + step.left == budget
        assert not step.too_large
        self.memory.run(step)
        self.schedule.done(step)
        for row, piece in enumerate(p for p in step.pieces if p.samples):
            sequence = piece.strand
            assert isinstance(sequence, Sequence)
            assert sequence.missing == 0
            for token in piece.guesses[:right]:
                self.schedule.append(sequence, token, guessed=True)
                self.pending[sequence.id] -= 1
            self.pending[sequence.id] -= 1
            if not self.pending[sequence.id] or row in ending:
                del self.pending[sequence.id]
                self.schedule.finish(sequence)
            else:
                self.schedule.append(sequence, 1000 + row)

    @precondition(lambda self: self.pending)
    @rule(keys=st.sets(st.integers(0, 40)))
    def remove(self, keys: set[int]) -> None:
        self.schedule.remove(keys)
        for key in keys:
            self.pending.pop(key, None)

    @rule()
    def finish_all(self) -> None:
        for _ in range(3000):
            if not self.pending:
                return
            self.step(64, set())
        pytest.fail("the schedule did not get on")

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "schedule"):
            return
        check_books(self.schedule, self.slots)
        assert self.schedule.running <= self.rows
        if not self.pending:
            assert self.slots.held == 0
            assert not self.schedule._tree._root.children
            assert not self.schedule._idle

    def teardown(self) -> None:
        if hasattr(self, "schedule"):
            self.finish_all()
            self.books_are_right()


TestBooks = Books.TestCase


def run(schedule: Schedule, slots: Slots, budget: int = 64) -> tuple[dict[Any, Sequence], int]:
    """Run all to their max_tokens; the sequences that ran, and all tokens computed."""
    memory, seen, tokens = Memory(slots.total), {}, 0
    for _ in range(10_000):
        step = schedule.plan(budget)
        if not step.pieces:
            return seen, tokens
        memory.run(step)
        schedule.done(step)
        tokens += step.tokens
        for piece in step.pieces:
            if piece.samples:
                assert isinstance(piece.strand, Sequence)
                seen[piece.strand.id] = piece.strand
                if piece.strand.more == 1:
                    schedule.finish(piece.strand)
                else:
                    schedule.append(piece.strand, 7)
    pytest.fail("the schedule did not get on")


def made(tokens: int = 4096, **changes: Any) -> tuple[Schedule, Slots]:
    slots = Slots(tokens)
    settings = {"limit": tokens, "max_rows": 64, **changes}
    return Schedule(slots, **settings), slots


def test_what_prompts_share_is_computed_once_and_charged_once() -> None:
    schedule, slots = made()
    head = tuple(range(50))
    asked = [Asked(n, (*head, *range(100 + n, 100 + n + 5)), 1) for n in range(20)]
    schedule.add(asked)
    seen, tokens = run(schedule, slots)
    # Neighbours begin alike: the prompt of n shares up to four tokens with n + 1, too few to pay.
    assert tokens == 50 + 20 * 5
    assert sorted(sequence.cached for sequence in seen.values()) == [0] + [50] * 19


def test_equal_prompts_share_all_but_the_last_token() -> None:
    schedule, slots = made()
    schedule.add(Asked(n, tuple(range(40)), 3) for n in range(5))
    _, tokens = run(schedule, slots)
    assert tokens == 39 + 5 * 3


def test_a_stretch_too_short_to_pay_is_not_shared() -> None:
    schedule, slots = made()
    schedule.add(Asked(n, (*range(15), 100 + n), 1) for n in range(5))
    _, tokens = run(schedule, slots)
    assert tokens == 5 * 16


def test_a_stem_lives_from_group_to_group_and_ends_with_its_last_user() -> None:
    schedule, slots = made(max_rows=1)
    head = tuple(range(60))
    schedule.add([Asked(0, (*head, 70), 1), Asked(1, (*head, 71), 2)])
    schedule.add([Asked(2, (*head, 72), 1)])
    held = []
    for _ in range(4):
        step = schedule.plan(64)
        schedule.done(step)
        for piece in step.pieces:
            if piece.samples:
                if piece.strand.more == 1:  # type: ignore[union-attr]  # stems do not sample
                    schedule.finish(piece.strand)  # type: ignore[arg-type]  # as above
                else:
                    schedule.append(piece.strand, 7)  # type: ignore[arg-type]  # as above
        held.append(slots.held)
    assert all(held[:3])
    assert held[3] == 0


def test_a_stem_that_is_split_later_stays_computed() -> None:
    schedule, slots = made()
    head = tuple(range(64))
    schedule.add(Asked(n, (*head, 100 + n), 9) for n in range(3))
    step = schedule.plan(200)
    schedule.done(step)
    for piece in step.pieces:
        if piece.samples:
            schedule.append(piece.strand, 7)  # type: ignore[arg-type]  # stems do not sample
    schedule.add([Asked("branch", (*head[:32], *range(200, 210)), 1)])
    check_books(schedule, slots)
    step = schedule.plan(200)
    assert step.tokens == 3 + 10
    assert [stem.computed for stem in stems_of(schedule)] == [32, 32]


def test_waiting_tokens_come_before_new_prompts() -> None:
    schedule, _ = made()
    schedule.add(Asked(n, tuple(range(100 * n, 100 * n + 10)), 5) for n in range(4))
    first = schedule.plan(40)
    schedule.done(first)
    for piece in first.pieces:
        schedule.append(piece.strand, 7)  # type: ignore[arg-type]  # stems do not sample
    schedule.add([Asked("long", tuple(range(900, 1000)), 1)])
    step = schedule.plan(40)
    assert [piece.count for piece in step.pieces] == [1, 1, 1, 1, 36]


def test_earlier_groups_begin_first_and_the_longest_answers_within_one() -> None:
    schedule, _ = made(max_rows=2)
    schedule.add([Asked("a", (1, 2), 3), Asked("b", (1, 3), 9)])
    schedule.add([Asked("c", (2, 2), 99)])
    assert [piece.strand.id for piece in schedule.plan(40).pieces] == ["b", "a"]  # type: ignore[union-attr]  # no stems here


def test_the_youngest_is_preempted_and_all_end() -> None:
    schedule, slots = made(256, limit=128)
    # As answers have been short so far, little memory is set aside for those that come.
    schedule.add([Asked("short", (1,) * 16, 1)])
    run(schedule, slots)
    schedule.add(Asked(n, (n,) * 12, 60) for n in range(2, 8))
    preempted: list[Hashable] = []
    order: list[Hashable] = []
    for _ in range(2000):
        running = [sequence.id for sequence in schedule._running]
        step = schedule.plan(64)
        if not step.pieces:
            break
        if step.preempted:
            preempted += running[-step.preempted :]
            assert running[0] not in running[-step.preempted :]  # the oldest goes on
        schedule.done(step)
        for piece in step.pieces:
            if piece.samples:
                assert isinstance(piece.strand, Sequence)
                if piece.strand.more == 1:
                    order.append(piece.strand.id)
                    schedule.finish(piece.strand)
                else:
                    schedule.append(piece.strand, 7)
    assert preempted
    assert sorted(order) == list(range(2, 8))  # type: ignore[type-var]  # integers
    assert slots.held == 0


def test_a_sequence_beyond_all_memory_leaves_alone() -> None:
    schedule, slots = made(96)
    schedule.add([Asked("huge", tuple(range(2000)), 1), Asked("small", (5, 6), 1)])
    seen: list[Hashable] = []
    for _ in range(4):
        step = schedule.plan(64)
        seen += [sequence.id for sequence in step.too_large]
        schedule.done(step)
        for piece in step.pieces:
            if piece.samples:
                schedule.finish(piece.strand)  # type: ignore[arg-type]  # stems do not sample
    assert seen == ["huge"]
    assert slots.held == 0


def calls_of_a_step(waiting: int) -> int:
    """Python calls that a step of eight running sequences makes, with so many more waiting."""
    schedule, _ = made(max_rows=8)
    head = tuple(range(40))
    schedule.add(Asked(n, (*head, 50 + n % 7, n), 50) for n in range(8 + waiting))
    for _ in range(2):
        step = schedule.plan(64)
        schedule.done(step)
        for piece in step.pieces:
            if piece.samples:
                schedule.append(piece.strand, 7)  # type: ignore[arg-type]  # stems do not sample
    calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    sys.setprofile(count)
    try:
        schedule.done(schedule.plan(64))
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_costs_the_same_however_many_wait() -> None:
    few = calls_of_a_step(100)
    assert few > 50
    assert calls_of_a_step(100_000) == few


@pytest.mark.parametrize("tokens", [48, 384, 4000, 32768, 10**6])
def test_memory_is_cut_into_eight_slabs_or_more_where_it_is_large_enough(tokens: int) -> None:
    assert slab_size(tokens) == 48 or tokens // slab_size(tokens) >= 8


def test_slots_of_one_size_lie_side_by_side() -> None:
    slots = Slots(32768)
    taken = [slots.take(length) for length in (100, 40, 128, 120, 33, 97, 1000)]
    starts = [slot.start for slot in taken if slot is not None and slot.size == 128]
    assert starts == [0, 128, 256, 384]
