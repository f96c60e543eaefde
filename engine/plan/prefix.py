"""What do the prompts in flight share?

A tree of their tokens: a node ends where prompts part, and counts the requests that come through
it. A stretch that several requests share, and that is long enough to pay, gets a stem: its keys and
values are computed once, every request below reads them, and they go when the last of them ends.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import count

from engine.plan.slots import Slot

# Shorter stretches are computed by each request anew: a call of attention more costs more.
SHORTEST_STEM = 16

_BLOCK = 64  # tokens compared at once


@dataclass(eq=False, slots=True)
class Stem:
    """Keys and values of a shared stretch: tokens `start` to `end` of each prompt below it.

    They stand in `slot` from `offset` on, the first `computed` of them. Stems that were one before
    prompts parted inside it still share a slot. Without a slot nothing is computed.
    """

    parent: "Stem | None"
    tokens: tuple[int, ...]  # a prompt that comes through here
    start: int
    end: int
    slot: Slot | None = None
    offset: int = 0
    computed: int = 0
    runners: int = 0  # running sequences that read it
    payer: Hashable | None = None  # id of the sequence that was charged for its tokens

    @property
    def missing(self) -> int:
        """Tokens still to be computed."""
        return self.end - self.start - self.computed

    def way_down(self) -> list["Stem"]:
        """The stems before this one, from the beginning of the prompt, and itself."""
        stems = [self]
        while stems[-1].parent is not None:
            stems.append(stems[-1].parent)
        return stems[::-1]


@dataclass(eq=False, slots=True)
class Node:
    """The tokens from its parent's `end` to its own, as `tokens` has them."""

    serial: int
    parent: "Node | None"
    tokens: tuple[int, ...]
    end: int
    users: int = 0
    children: dict[int, "Node"] = field(default_factory=dict)  # by first token
    stem: Stem | None = None

    def way_up(self) -> Iterator["Node"]:
        """This node, its parent, and so on to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class PrefixTree:
    """All prompts in flight. `on_split` is told of a stem that became two: the upper, the lower."""

    def __init__(self, on_split: Callable[[Stem, Stem], None]) -> None:
        self._on_split = on_split
        self._serials = count()
        self._root = Node(serial=next(self._serials), parent=None, tokens=(), end=0)

    def add(self, tokens: tuple[int, ...], length: int) -> Node:
        """Count one more request whose prompt begins with `length` tokens; where those end."""
        node = self._root
        node.users += 1
        while node.end < length:
            child = node.children.get(tokens[node.end])
            if child is None:
                child = Node(next(self._serials), parent=node, tokens=tokens, end=length)
                node.children[tokens[node.end]] = child
            else:
                end = node.end + _common(child, tokens, node.end, length)
                if end < child.end:
                    child = self._split(node, child, end)
            child.users += 1
            node = child
        return node

    def remove(self, node: Node) -> list[Stem]:
        """Count one request less; the stems that nobody needs any more."""
        unused = []
        for current in node.way_up():
            current.users -= 1
            if not current.users and current.parent is not None:
                del current.parent.children[current.tokens[current.parent.end]]
                if current.stem is not None:
                    unused.append(current.stem)
        return unused

    def shared_way(self, node: Node) -> tuple[int, ...]:
        """Names of the stretches on the way to a node that have a stem, or would get one now."""
        names: list[int] = []
        begin = 0
        for step in reversed(list(node.way_up())):
            if step.stem is not None or self._pays(step, begin):
                names.append(step.serial)
                begin = step.end
        return tuple(names)

    def stem_of(self, node: Node) -> Stem | None:
        """The last stem on the way to a node, after giving every shared stretch its own."""
        stem: Stem | None = None
        for step in reversed(list(node.way_up())):
            begin = 0 if stem is None else stem.end
            if step.stem is None and self._pays(step, begin):
                step.stem = Stem(parent=stem, tokens=step.tokens, start=begin, end=step.end)
            if step.stem is not None:
                stem = step.stem
        return stem

    @staticmethod
    def _pays(node: Node, begin: int) -> bool:
        """Whether a stem from `begin` to the node's end is worth its calls."""
        return node.users > 1 and node.end - begin >= SHORTEST_STEM

    def _split(self, parent: Node, lower: Node, end: int) -> Node:
        """Let a node end earlier, its rest below it; the new upper node.

        The lower one stays the object it was: requests know it as the end of their prompt.
        """
        upper = Node(next(self._serials), parent, lower.tokens, end, users=lower.users)
        parent.children[lower.tokens[parent.end]] = upper
        upper.children[lower.tokens[end]] = lower
        lower.parent = upper
        if lower.stem is not None and end - lower.stem.start >= SHORTEST_STEM:
            upper.stem = self._split_stem(lower.stem, end)
        return upper

    def _split_stem(self, lower: Stem, end: int) -> Stem:
        """The first part of a stem as one of its own; nothing that was computed is lost."""
        length = end - lower.start
        upper = Stem(
            parent=lower.parent,
            tokens=lower.tokens,
            start=lower.start,
            end=end,
            slot=lower.slot,
            offset=lower.offset,
            computed=min(length, lower.computed),
            runners=lower.runners,
            payer=lower.payer,
        )
        lower.parent = upper
        lower.start = end
        lower.offset += length
        lower.computed -= upper.computed
        self._on_split(upper, lower)
        return upper


def _common(child: Node, tokens: tuple[int, ...], begin: int, length: int) -> int:
    """How many tokens of the child's stretch the prompt has too, up to its `length`."""
    own, end = child.tokens, min(child.end, length)
    place = begin
    while place < end and own[place : place + _BLOCK] == tokens[place : place + _BLOCK]:
        place += _BLOCK
    while place < end and own[place] == tokens[place]:
        place += 1
    return min(place, end) - begin
