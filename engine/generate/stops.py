"""Where does a generated text end? At the first of its stop strings, if one comes.

Tokens and characters do not share borders: a token may hold half a character, a stop string may
begin in the middle of one token and end in another. So the text is looked at, not the tokens.
"""

from collections.abc import Callable, Sequence

# What a decoder writes for bytes that are no whole character (yet).
_BROKEN = "\ufffd"
# Tokens may end inside a character several times in a row; so many in a row are not text. (Should
# they be, a stop string is only seen late: the finished answer is cut as a whole in any case.)
_LONGEST_BROKEN = 32


def cut(text: str, stop: Sequence[str], begin: int = 0) -> tuple[str, bool]:
    """The text before the earliest stop string from `begin` on, and whether one stands there."""
    found = [position for each in stop if (position := text.find(each, begin)) >= 0]
    return (text[: min(found)], True) if found else (text, False)


class StopWatch:
    """Watches one answer grow and says when a stop string stands in it.

    Each token decodes only the last few, so a long answer costs no more per token than a short one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode = decode
        self._stop = stop
        self._reach = max(map(len, stop)) - 1
        self._ids: list[int] = []
        # Tokens from `_context` on are decoded again, since a token's text can depend on the one
        # before it (leading spaces); up to `_read` their text stands in `_tail` already.
        self._context = 0
        self._read = 0
        self._tail = ""

    def push(self, token: int) -> bool:
        """Take one more token in; True when the text now holds a stop string."""
        self._ids.append(token)
        known = self._decode(self._ids[self._context : self._read])
        text = self._decode(self._ids[self._context :])
        fresh = text[len(known) :]
        window = self._tail + fresh
        whole = fresh and not fresh.endswith(_BROKEN)
        if whole or len(self._ids) - self._read > _LONGEST_BROKEN:
            self._tail = window[-self._reach :] if self._reach else ""
            self._context, self._read = self._read, len(self._ids)
        return any(stop in window for stop in self._stop)

    def skip(self, token: int) -> None:
        """Take one more token in; no stop string is to be found that begins before its end."""
        self.push(token)
        self._tail = ""
