"""Is a wrong value told by the place where the client wrote it?"""

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from service.faults import Fault, first_fault


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["a", "b"]
    value: StrictStr | Annotated[list[StrictInt], Field(max_length=2)] = ""


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: StrictStr
    inner: list[Inner] = []


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({}, "name", "missing_required_parameter"),
        ({"name": 1}, "name", "invalid_type"),
        ({"name": "x", "nam": 1}, "nam", "unknown_parameter"),
        ({"name": "x", "inner": 5}, "inner", "invalid_type"),
        ({"name": "x", "inner": [{}]}, "inner.0.kind", "missing_required_parameter"),
        ({"name": "x", "inner": [{"kind": "c"}]}, "inner.0.kind", "invalid_value"),
        ({"name": "x", "inner": [{"kind": "a", "x": 1}]}, "inner.0.x", "unknown_parameter"),
        (
            {"name": "x", "inner": [{"kind": "a", "value": [1, "2"]}]},
            "inner.0.value.1",
            "invalid_type",
        ),
        ({"name": "x", "inner": [{"kind": "a", "value": 3}]}, "inner.0.value", "invalid_type"),
        ({"name": "x", "inner": [{"kind": "a", "value": [1, 2, 3]}]}, None, "invalid_value"),
    ],
)
def test_a_fault_names_the_place_and_the_kind(
    given: dict[str, object], param: str | None, code: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(given)
    fault = first_fault(caught.value, given=given)
    if param is not None:
        assert (fault.param, fault.code) == (param, code)
        assert param in fault.message
    assert isinstance(fault, Fault)


def test_the_first_of_several_faults_is_told() -> None:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate({"name": 1, "inner": 2, "other": 3})
    assert first_fault(caught.value, given={"name": 1, "inner": 2, "other": 3}).param == "name"
