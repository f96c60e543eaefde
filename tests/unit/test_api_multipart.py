"""Is a form read the same however the network cuts it, and refused wherever it is broken?"""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.api.multipart import Event, Field, FileData, FileStart, FormReader
from service.api.receive import Form, PartForm
from service.errors import BadRequest, TooLarge

CONTENT_TYPE = 'multipart/form-data; boundary="XyZ"'


def _part(disposition: str | bytes, body: bytes) -> bytes:
    header = disposition if isinstance(disposition, bytes) else disposition.encode()
    return b"--XyZ\r\nContent-Disposition: form-data; " + header + b"\r\n\r\n" + body + b"\r\n"


def _field(name: str, value: str) -> bytes:
    return _part(f'name="{name}"', value.encode())


def _file(body: bytes, filename: str | bytes = "a.jsonl") -> bytes:
    raw = filename if isinstance(filename, bytes) else filename.encode()
    return _part(b'name="file"; filename="' + raw + b'"', body)


END = b"--XyZ--\r\n"


def _read(body: bytes, cuts: list[int]) -> tuple[list[Event], bytes]:
    """The events other than data, and all the data."""
    reader = FormReader(CONTENT_TYPE)
    events: list[Event] = []
    edges = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    for start, end in pairwise(edges):
        events += reader.feed(body[start:end])
    reader.finish()
    data = b"".join(event.data for event in events if isinstance(event, FileData))
    return [event for event in events if not isinstance(event, FileData)], data


@settings(deadline=None)
@given(
    st.binary(max_size=300) | st.sampled_from([b"\r\n--Xy", b"\r\n--XyZ", b"--XyZ--", b"\r\n\r\n"]),
    st.lists(st.integers(min_value=0), max_size=12),
    st.booleans(),
)
def test_a_form_reads_the_same_however_it_is_cut(
    data: bytes, cuts: list[int], file_first: bool
) -> None:
    if b"\r\n--XyZ" in b"\r\n" + data:
        data = data.replace(b"XyZ", b"xYz")
    parts = [_file(data), _field("purpose", "batch")]
    body = b"".join(parts if file_first else parts[::-1]) + END
    events, read = _read(body, cuts)
    expected = [FileStart("a.jsonl"), Field("purpose", "batch")]
    assert events == (expected if file_first else expected[::-1])
    assert read == data


@settings(deadline=None)
@given(st.binary(max_size=400), st.lists(st.integers(min_value=0), max_size=5))
def test_any_bytes_are_a_form_or_a_bad_request(noise: bytes, cuts: list[int]) -> None:
    # Nothing but a BadRequest may come out of it.
    with suppress(BadRequest):
        _read(b"--XyZ\r\n" + noise, cuts)


@pytest.mark.parametrize("filename", ["ü漢🎈.jsonl", "a b.jsonl", "../../etc/passwd", "C:x", "%00"])
def test_a_filename_comes_through_as_given(filename: str) -> None:
    events, _ = _read(_file(b"x", filename) + END, [])
    assert events == [FileStart(filename)]


@pytest.mark.parametrize(
    "content_type",
    ["", "application/json", "multipart/form-data", "multipart/mixed; boundary=XyZ",
     "multipart/form-data; boundary=" + "x" * 1000],
)  # fmt: skip
def test_another_content_type_is_refused(content_type: str) -> None:
    with pytest.raises(BadRequest):
        FormReader(content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no boundary at all",
        _file(b"x"),
        _file(b"x") + b"--XyZ",
        b"--XyZ\r\nContent-Type: text/plain\r\n\r\nx\r\n" + END,
        b"--XyZ\r\nContent-Disposition: attachment; name=file\r\n\r\nx\r\n" + END,
        _part('name="file"', b"x") + END,
        _part('name="file"; filename=""', b"x") + END,
        _file(b"x", b"\xff.jsonl") + END,
        _part(b'name="\xff"', b"x") + END,
        _part('name="purpose"', b"\xff") + END,
        _field("purpose", "x" * 5_000) + END,
        _field("purpose", "x") * 17 + END,
        b"--XyZ\r\nContent-Disposition: form-data; name=a" + b"a" * 10_000 + b"\r\n\r\nx\r\n" + END,
    ],
)
def test_a_broken_form_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        _read(body, [])


def _take(*events: Event, max_bytes: int = 100) -> Form:
    form = Form(max_bytes)
    for event in events:
        form.take(event)
    return form


START, DATA, PURPOSE = FileStart("a.jsonl"), FileData(b"x"), Field("purpose", "batch")
ANCHOR = Field("expires_after[anchor]", "created_at")


def _seconds(text: str) -> Field:
    return Field("expires_after[seconds]", text)


@pytest.mark.parametrize(
    ("events", "param", "code"),
    [
        ([PURPOSE], "file", "missing_required_parameter"),
        ([START, DATA], "purpose", "missing_required_parameter"),
        ([START, PURPOSE], "file", "empty_file"),
        ([START, FileData(b""), PURPOSE], "file", "empty_file"),
        ([Field("purpose", "batch_output")], "purpose", "invalid_value"),
        ([Field("purpose", "")], "purpose", "invalid_value"),
        ([PURPOSE, PURPOSE], "purpose", "invalid_value"),
        ([START, START], "file", "invalid_value"),
        ([Field("color", "red")], "color", "unknown_parameter"),
        ([FileStart("a.txt"), PURPOSE], "file", "invalid_file_format"),
        ([PURPOSE, FileStart("jsonl")], "file", "invalid_file_format"),
        ([FileStart("a\0.jsonl")], "file", "invalid_value"),
        ([FileStart("a\n.jsonl")], "file", "invalid_value"),
        ([FileStart("a\x85.jsonl")], "file", "invalid_value"),
        ([FileStart("a" * 250 + ".jsonl")], "file", "invalid_value"),
        ([START, DATA, PURPOSE, ANCHOR], "expires_after[seconds]", "missing_required_parameter"),
        (
            [START, DATA, PURPOSE, _seconds("3600")],
            "expires_after[anchor]",
            "missing_required_parameter",
        ),
        (
            [START, DATA, PURPOSE, Field("expires_after[anchor]", "now"), _seconds("3600")],
            "expires_after[anchor]",
            "invalid_value",
        ),
        (
            [START, DATA, PURPOSE, ANCHOR, _seconds("3599")],
            "expires_after[seconds]",
            "invalid_value",
        ),
        (
            [START, DATA, PURPOSE, ANCHOR, _seconds("2592001")],
            "expires_after[seconds]",
            "invalid_value",
        ),
        ([START, DATA, PURPOSE, ANCHOR, _seconds("1e4")], "expires_after[seconds]", "invalid_type"),
        ([START, DATA, PURPOSE, ANCHOR, _seconds("-1")], "expires_after[seconds]", "invalid_type"),
        (
            [START, DATA, PURPOSE, ANCHOR, _seconds("٣٦٠٠")],
            "expires_after[seconds]",
            "invalid_type",
        ),
        (
            [START, DATA, PURPOSE, ANCHOR, _seconds("9" * 99)],
            "expires_after[seconds]",
            "invalid_type",
        ),
    ],
)
def test_a_wrong_form_names_the_field(events: list[Event], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as caught:
        _take(*events).result()
    assert (caught.value.param, caught.value.code) == (param, code)


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "b.NdJson", ".jsonl"])
def test_both_endings_are_taken_in_any_case(name: str) -> None:
    upload = _take(FileStart(name), DATA, PURPOSE).result()
    assert (upload.filename, upload.size, upload.expires_after_s) == (name, 1, None)


def test_another_purpose_takes_any_name() -> None:
    upload = _take(FileStart("cat.png"), DATA, Field("purpose", "vision"), ANCHOR, _seconds("3600"))
    assert upload.result().expires_after_s == 3600


def test_the_limit_itself_is_taken_and_one_byte_more_is_not() -> None:
    form = _take(START, FileData(b"x" * 60), FileData(b"x" * 40))
    with pytest.raises(TooLarge) as caught:
        form.take(FileData(b"x"))
    assert "100 bytes" in caught.value.message


@pytest.mark.parametrize("disposition", ['name="data"; filename="x"', 'name="data"'])
def test_another_part_may_be_the_data_with_a_filename_or_without(disposition: str) -> None:
    reader = FormReader(CONTENT_TYPE, data="data", named=False)
    form = PartForm(100)
    for event in reader.feed(_part(disposition, b"x" * 100) + END):
        form.take(event)
    reader.finish()
    assert form.result() == 100
    assert form.pieces.release() == b"x" * 100


@pytest.mark.parametrize(
    ("events", "param", "code"),
    [
        ([], "data", "missing_required_parameter"),
        ([START], "data", "invalid_value"),
        ([START, DATA, START], "data", "invalid_value"),
        ([START, DATA, PURPOSE], "purpose", "unknown_parameter"),
    ],
)
def test_a_wrong_form_of_a_part_names_the_field(events: list[Event], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as caught:
        _taken(events)
    assert (caught.value.param, caught.value.code) == (param, code)


def _taken(events: list[Event]) -> int:
    form = PartForm(100)
    for event in events:
        form.take(event)
    return form.result()


def test_a_part_over_the_limit_is_refused_as_soon_as_it_is() -> None:
    form = PartForm(100)
    form.take(FileData(b"x" * 100))
    with pytest.raises(TooLarge) as caught:
        form.take(FileData(b"x"))
    assert caught.value.param == "data"
