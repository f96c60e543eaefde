"""Which bytes does a Range header get?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.api.ranges import Span, Unsatisfiable, wanted


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("bytes=0-0", Span(0, 1)),
        ("bytes=0-99", Span(0, 100)),
        ("bytes=0-100", Span(0, 100)),
        ("bytes=10-19", Span(10, 10)),
        ("bytes=99-", Span(99, 1)),
        ("bytes=-1", Span(99, 1)),
        ("bytes=-100", Span(0, 100)),
        ("bytes=-1000", Span(0, 100)),
        ("Bytes= 5-6", Span(5, 2)),
        (None, None),
        ("", None),
        ("bytes=", None),
        ("bytes=-", None),
        ("bytes=9-5", None),
        ("bytes=a-b", None),
        ("lines=0-5", None),
        ("bytes=0-1,5-6", None),
        ("bytes=٠-٥", None),
        ("bytes=0-" + "9" * 30, None),
    ],
)
def test_one_range_is_honoured_and_the_rest_is_the_whole(
    header: str | None, expected: Span | None
) -> None:
    assert wanted(header, 100) == expected


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=-0"])
def test_a_range_behind_the_end_cannot_be_satisfied(header: str) -> None:
    with pytest.raises(Unsatisfiable) as caught:
        wanted(header, 100)
    assert caught.value.status == 416
    assert caught.value.headers == {"content-range": "bytes */100"}


def test_of_nothing_no_range_can_be_had() -> None:
    with pytest.raises(Unsatisfiable):
        wanted("bytes=0-", 0)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 60), st.integers(0, 60))
def test_a_span_is_what_a_slice_would_give(size: int, start: int, last: int) -> None:
    data = bytes(range(size))
    try:
        span = wanted(f"bytes={start}-{last}", size)
    except Unsatisfiable:
        assert start >= size
        return
    if span is None:
        assert last < start
        return
    assert data[span.start : span.start + span.length] == data[start : last + 1]
    assert span.content_range(size) == f"bytes {start}-{min(last, size - 1)}/{size}"
