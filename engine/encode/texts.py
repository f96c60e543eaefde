"""Which texts are to be computed, when several requests may ask for the same one?"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from engine.request import EncodeRequest

_OVERHEAD = 256  # bytes of a stored row beside its numbers: key, header, table


@dataclass(frozen=True, slots=True)
class Text:
    """What is computed once for all requests that ask for it; `id` follows from the rest."""

    id: bytes
    tokens: tuple[int, ...]
    first: int | None

    @classmethod
    def of(cls, request: EncodeRequest) -> "Text":
        """What this request asks to be read."""
        content = array("q", (-1 if request.first is None else request.first, *request.tokens))
        return cls(blake2b(content, digest_size=16).digest(), request.tokens, request.first)


class Asked:
    """Which requests wait for which text, and what recent texts came to.

    Of requests for the same tokens one is computed; those that come while it is in flight, or while
    its row is still in the store of `store_bytes`, are answered by its row.
    """

    def __init__(self, store_bytes: int) -> None:
        self._store_bytes = store_bytes
        self._stored: OrderedDict[bytes, NDArray[np.float32]] = OrderedDict()  # oldest use first
        self._held = 0  # bytes of them
        self._waiting: dict[bytes, list[EncodeRequest]] = {}
        self._text_of: dict[Hashable, bytes] = {}
        self._known: dict[Hashable, tuple[EncodeRequest, NDArray[np.float32]]] = {}

    def add(self, requests: Iterable[EncodeRequest]) -> list[Text]:
        """Take requests in; the texts that are now to be computed."""
        new = []
        for request in requests:
            text = Text.of(request)
            row = self._stored.get(text.id)
            if row is not None:
                self._stored.move_to_end(text.id)
                self._known[request.id] = (request, row)
                continue
            self._text_of[request.id] = text.id
            asking = self._waiting.setdefault(text.id, [])
            asking.append(request)
            if len(asking) == 1:
                new.append(text)
        return new

    def known(self) -> list[tuple[EncodeRequest, NDArray[np.float32]]]:
        """Requests, since the last call, whose rows were there when they came."""
        known, self._known = self._known, {}
        return list(known.values())

    def remove(self, ids: Iterable[Hashable]) -> set[bytes]:
        """Forget these requests; the texts that nobody asks for any more."""
        unasked = set()
        for request_id in ids:
            self._known.pop(request_id, None)
            text_id = self._text_of.pop(request_id, None)
            if text_id is None:
                continue
            left = [r for r in self._waiting[text_id] if r.id != request_id]
            if left:
                self._waiting[text_id] = left
            else:
                del self._waiting[text_id]
                unasked.add(text_id)
        return unasked

    def settle(self, text: Text, row: NDArray[np.float32] | None) -> list[EncodeRequest]:
        """The requests that a computed text answers; None where it came to nothing."""
        asking = self._waiting.pop(text.id, [])
        for request in asking:
            del self._text_of[request.id]
        if row is not None:
            self._keep(text.id, row)
        return asking

    def _keep(self, text_id: bytes, row: NDArray[np.float32]) -> None:
        size = row.nbytes + _OVERHEAD
        if size > self._store_bytes // 8:  # one long text's tokens must not push out all others
            return
        while self._held + size > self._store_bytes:
            _, oldest = self._stored.popitem(last=False)
            self._held -= oldest.nbytes + _OVERHEAD
        self._stored[text_id] = row.copy()  # not a view that keeps its whole batch
        self._held += size
