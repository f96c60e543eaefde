"""How are tables declared: names of constraints, types of columns, words as enums?"""

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    DateTime,
    Enum,
    Integer,
    MetaData,
    Text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB
from sqlalchemy.orm import DeclarativeBase


def words(enum: type[StrEnum], name: str) -> Enum:
    """A text column that a CHECK holds to the enum's values (not its Python names)."""
    return Enum(
        enum,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=16,
        values_callable=lambda members: [member.value for member in members],
    )


class Base(DeclarativeBase):
    """Names every constraint, so that a migration can name it too."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as a plain class attribute
        datetime: DateTime(timezone=True),
        str: Text,
        dict[str, Any]: JSONB,
        dict[str, str]: JSONB,
        list[dict[str, Any]]: JSONB,
        list[str]: ARRAY(Text),
        list[int]: ARRAY(Integer),
    }
