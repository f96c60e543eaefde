"""Where does a page of a list begin? Behind the object that `after` names, which must be known."""

from collections.abc import Callable
from uuid import UUID

from service import ids
from service.errors import BadRequest


def cursor(
    after: str | None, prefix: ids.Prefix, known: Callable[[UUID], bool], *, what: str
) -> UUID | None:
    """The id in `after`; None for the first page. Raises 400 for one that is not `known`."""
    if after is None:
        return None
    found = ids.parse(prefix, after)
    if found is None or not known(found):
        raise unknown_after(after, what=what)
    return found


def unknown_after(after: str, *, what: str) -> BadRequest:
    """400 for an `after` that names nothing."""
    return BadRequest(
        f"Invalid value for 'after': no {what} '{after[:64]}'.",
        param="after",
        code="invalid_value",
    )
