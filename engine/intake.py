"""Which requests are in flight, and which were refused at the door?"""

from collections.abc import Callable, Hashable, Iterable, Sequence

from engine.request import Failure, Generation, Request, Result
from engine.surface import Counters


class Intake:
    """The ids an engine owes a result for; every engine keeps its books with one."""

    def __init__(self, refuse: Callable[[Request], Failure | None]) -> None:
        self._refuse = refuse
        self._in_flight: set[Hashable] = set()
        self._refused: list[Failure] = []
        self.counters = Counters()

    @property
    def pending(self) -> int:
        """Requests that have no result yet."""
        return len(self._in_flight)

    def admit(self, requests: Iterable[Request]) -> list[Request]:
        """Those that may run; the others' failures wait for `refused`.

        Raises ValueError, and takes none in, where an id is in flight or comes twice.
        """
        arrived = list(requests)
        ids: set[Hashable] = set()
        for request in arrived:
            if request.id in self._in_flight or request.id in ids:
                msg = f"a request with the id {request.id!r} is in flight already"
                raise ValueError(msg)
            ids.add(request.id)
        self._in_flight |= ids
        accepted = []
        for request in arrived:
            failure = self._refuse(request)
            if failure is None:
                accepted.append(request)
            else:
                self._refused.append(failure)
        return accepted

    def refused(self) -> list[Result]:
        """The failures of what was refused since the last call."""
        failures, self._refused = self._refused, []
        return self.answer(failures)

    def answer(self, results: Sequence[Result]) -> list[Result]:
        """Take these results off the books and return them."""
        self._in_flight.difference_update(result.id for result in results)
        self.counters += _count(results)
        return list(results)

    def forget(self, ids: Iterable[Hashable]) -> set[Hashable]:
        """Take these ids off the books; those of them that were in flight."""
        dropped = self._in_flight.intersection(ids)
        self._in_flight -= dropped
        self._refused = [failure for failure in self._refused if failure.id not in dropped]
        return dropped


def _count(results: Sequence[Result]) -> Counters:
    answers = [result for result in results if not isinstance(result, Failure)]
    return Counters(
        requests=len(results),
        failures=len(results) - len(answers),
        input_tokens=sum(answer.input_tokens for answer in answers),
        output_tokens=sum(
            answer.output_tokens for answer in answers if isinstance(answer, Generation)
        ),
    )
