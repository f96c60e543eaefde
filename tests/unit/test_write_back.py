"""Does a part give its records back as they went in?"""

import orjson
from hypothesis import given
from hypothesis import strategies as st

from service.batch import LineState
from service.faults import Fault
from worker.answers import Answered, refused
from worker.write_back import FAILED, HEADER_BYTES, SUCCEEDED, Record, _part, decode, encode

records = st.builds(
    Record,
    line=st.integers(min_value=1, max_value=10**12 - 1),
    kind=st.sampled_from([SUCCEEDED, FAILED]),
    data=st.binary(max_size=40).filter(lambda data: b"\n" not in data),
)


@given(records)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    raw = encode(record)
    assert raw.count(b"\n") == 1
    assert decode(raw[:-1]) == record
    assert raw[HEADER_BYTES:-1] == record.data


@given(st.lists(records, max_size=20))
def test_records_sort_by_line_as_bytes_do(some: list[Record]) -> None:
    by_bytes = sorted(some, key=encode)
    assert [each.line for each in by_bytes] == sorted(each.line for each in some)


def test_a_part_is_sorted_and_says_where_each_response_line_stands() -> None:
    answered = [
        Answered(9, "i", 200, {"n": 9}, input_tokens=4, output_tokens=2),
        refused(2, "b", Fault("no", None, "invalid_value")),
        Answered(5, "e", 200, {"n": 5}),
    ]
    data, rows = _part(answered)
    assert [row.line for row in rows] == [2, 5, 9]
    assert [row.state for row in rows] == [
        LineState.FAILED,
        LineState.SUCCEEDED,
        LineState.SUCCEEDED,
    ]
    for row, name in zip(rows, ("b", "e", "i"), strict=True):
        cut = data[row.part_offset : row.part_offset + row.part_length]
        assert orjson.loads(cut)["custom_id"] == name
    assert (rows[0].error_code, rows[0].status_code) == ("invalid_value", 400)
    assert (rows[2].input_tokens, rows[2].output_tokens) == (4, 2)
    kinds = [decode(line).kind for line in data[:-1].split(b"\n")]
    assert kinds == [FAILED, SUCCEEDED, SUCCEEDED]
