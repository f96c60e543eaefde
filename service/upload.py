"""Which states can an upload be in, and which moves between them are legal?

pending ─▶ completed | cancelled | expired
"""

from collections.abc import Mapping
from enum import StrEnum


class UploadStatus(StrEnum):
    """The reference's four words."""

    PENDING = "pending"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_U = UploadStatus
UPLOAD_MOVES: Mapping[UploadStatus, frozenset[UploadStatus]] = {
    _U.PENDING: frozenset({_U.COMPLETED, _U.CANCELLED, _U.EXPIRED}),
    _U.COMPLETED: frozenset(),
    _U.CANCELLED: frozenset(),
    _U.EXPIRED: frozenset(),
}
