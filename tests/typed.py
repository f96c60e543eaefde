"""Is an object just what the official client's type says: nothing missing, nothing beside it?"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

Typed = TypeVar("Typed", bound=BaseModel)


def exactly(shape: type[Typed], value: Mapping[str, Any], *, beside: Sequence[str] = ()) -> Typed:
    """`value` as `shape`, strictly typed; of keys that it does not know, only `beside` may be."""
    typed = shape.model_validate(value, strict=True)
    assert set(typed.model_extra or {}) <= set(beside), typed.model_extra
    for name in type(typed).model_fields:
        _nothing_beside(getattr(typed, name), name)
    return typed


def _nothing_beside(value: object, where: str) -> None:
    match value:
        case BaseModel():
            assert not value.model_extra, (where, value.model_extra)
            for name in type(value).model_fields:
                _nothing_beside(getattr(value, name), f"{where}.{name}")
        case list():
            for position, item in enumerate(value):
                _nothing_beside(item, f"{where}.{position}")
        case _:
            pass
