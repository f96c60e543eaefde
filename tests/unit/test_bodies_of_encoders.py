"""Does a faulty body to classify, score, rerank or moderate get a 400 that names the parameter?"""

from typing import Any

import pytest
from openai.types import moderation_create_params

from service.bodies import check
from service.bodies.check import InvalidBody, Rules
from service.bodies.classify import MAX_TEMPLATES, Aggregation, ClassifyBody
from service.bodies.moderations import ModerationBody
from service.bodies.score import RerankBody, ScoreBody
from service.catalog import ModelKind
from service.faults import Fault
from service.settings import UnknownParameters

INPUTS = 5
RULES = Rules(max_inputs=INPUTS)
LENIENT = Rules(max_inputs=INPUTS, unknown=UnknownParameters.IGNORE)
TOO_MANY = ["x"] * (INPUTS + 1)


def classify(rules: Rules = RULES, **given: Any) -> ClassifyBody:
    return check.classify({"model": "m", "input": "x", **given}, rules, ModelKind.CLASSIFY)


def tag(rules: Rules = RULES, **given: Any) -> ClassifyBody:
    return check.classify({"model": "m", "input": "x", **given}, rules, ModelKind.TOKEN_CLASSIFY)


def zero_shot(rules: Rules = RULES, **given: Any) -> ClassifyBody:
    body = {"model": "m", "input": "x", "labels": ["a", "b"], **given}
    return check.classify(body, rules, ModelKind.EMBED)


def score(rules: Rules = RULES, **given: Any) -> ScoreBody:
    return check.score({"model": "m", "text_1": "x", "text_2": "y", **given}, rules)


def rerank(rules: Rules = RULES, **given: Any) -> RerankBody:
    return check.rerank({"model": "m", "query": "x", "documents": ["y"], **given}, rules)


def moderation(rules: Rules = RULES, **given: Any) -> ModerationBody:
    return check.moderation({"model": "m", "input": "x", **given}, rules)


CLASSIFYING = [classify, tag, zero_shot]
ALL = [*CLASSIFYING, score, rerank, moderation]


def fault_of(call: Any, **given: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidBody) as caught:
        call(**given)
    fault: Fault = caught.value.fault
    assert f"'{fault.param}'" in fault.message
    assert fault.message.endswith(".")
    for word in ("dictionary", "instance", "Strict", "Document", "validation error", "None"):
        assert word not in fault.message
    return fault.param, fault.code


@pytest.mark.parametrize("call", [*CLASSIFYING, moderation])
@pytest.mark.parametrize(
    ("value", "param", "code"),
    [
        ("", "input", "invalid_value"),
        ([], "input", "invalid_value"),
        (["a", ""], "input", "invalid_value"),
        (5, "input", "invalid_type"),
        ({"a": 1}, "input", "invalid_type"),
        (["a", 1], "input.1", "invalid_type"),
        ([None], "input.0", "invalid_type"),
        (TOO_MANY, "input", "invalid_value"),
    ],
)
def test_a_fault_in_the_input_is_named(call: Any, value: object, param: str, code: str) -> None:
    assert fault_of(call, input=value) == (param, code)


def test_token_ids_are_taken_where_no_characters_are_to_be_named() -> None:
    for call in (classify, zero_shot):
        assert call(input=[1, 2]).input == [[1, 2]]
        assert call(input=[[1], [2]]).input == [[1], [2]]
    assert fault_of(tag, input=[1, 2]) == ("input", "invalid_type")
    assert fault_of(moderation, input=[1, 2]) == ("input.0", "invalid_type")


@pytest.mark.parametrize(
    ("call", "given", "param", "code"),
    [
        (classify, {"logits": 1}, "logits", "invalid_type"),
        (classify, {"return_all_scores": "yes"}, "return_all_scores", "invalid_type"),
        (classify, {"truncate": "yes"}, "truncate", "invalid_type"),
        (zero_shot, {"labels": None}, "labels", "missing_required_parameter"),
        (zero_shot, {"labels": []}, "labels", "invalid_value"),
        (zero_shot, {"labels": ["a", ""]}, "labels", "invalid_value"),
        (zero_shot, {"labels": "a"}, "labels", "invalid_type"),
        (zero_shot, {"labels": ["a", 5]}, "labels.1", "invalid_type"),
        (zero_shot, {"labels": ["a", "b", "a"]}, "labels", "invalid_value"),
        (zero_shot, {"labels": list("abcdef")}, "labels", "invalid_value"),
        (zero_shot, {"templates": []}, "templates", "invalid_value"),
        (zero_shot, {"templates": 5}, "templates", "invalid_type"),
        (zero_shot, {"templates": ["about {}", "none"]}, "templates.1", "invalid_value"),
        (zero_shot, {"templates": ["{} or {}"]}, "templates.0", "invalid_value"),
        (zero_shot, {"templates": ["{}"] * (MAX_TEMPLATES + 1)}, "templates", "invalid_value"),
        # Two labels in three templates are six texts.
        (zero_shot, {"templates": ["{}", "a {}", "b {}"]}, "templates", "invalid_value"),
        (zero_shot, {"multi_label": 1}, "multi_label", "invalid_type"),
        (zero_shot, {"input": [1], "prompt_name": "query"}, "prompt_name", "invalid_value"),
        (tag, {"aggregation": "sum"}, "aggregation", "invalid_value"),
        (tag, {"overlap": -1}, "overlap", "invalid_value"),
        (tag, {"overlap": 1.5}, "overlap", "invalid_type"),
    ],
)
def test_a_fault_of_a_classify_body_is_named(
    call: Any, given: dict[str, Any], param: str, code: str
) -> None:
    assert fault_of(call, **given) == (param, code)


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        *(
            (call, name, value)
            for call in (classify, tag)
            for name, value in [
                ("labels", ["a"]),
                ("templates", ["{}"]),
                ("multi_label", True),
                ("multi_label", False),
                ("prompt_name", "query"),
            ]
        ),
        *(
            (call, name, value)
            for call in (classify, zero_shot)
            for name, value in [("aggregation", "simple"), ("overlap", 0)]
        ),
        (tag, "logits", True),
        (tag, "return_all_scores", True),
    ],
)
def test_what_a_model_of_that_kind_cannot_do_is_refused(
    call: Any, name: str, value: object
) -> None:
    assert fault_of(call, **{name: value}) == (name, "unsupported_parameter")


def test_false_asks_for_nothing() -> None:
    plain = tag()
    assert tag(logits=False, return_all_scores=False).input == plain.input


def test_each_label_goes_into_each_template() -> None:
    assert zero_shot().labelled == ["This text is about a.", "This text is about b."]
    body = zero_shot(templates=["{}!", "no {}?"], multi_label=True)
    assert body.labelled == ["a!", "no a?", "b!", "no b?"]
    assert classify().labelled == []
    # A label is not a template itself.
    assert zero_shot(labels=["{}", "{x}"], templates=["<{}>"]).labelled == ["<{}>", "<{x}>"]


def test_aggregations_are_the_pipelines() -> None:
    for name in ("none", "simple", "first", "average", "max"):
        assert tag(aggregation=name).aggregation is Aggregation(name)


@pytest.mark.parametrize(
    ("given", "first", "second"),
    [
        ({}, ["x"], ["y"]),
        ({"text_2": ["y", "z"]}, ["x"], ["y", "z"]),
        ({"text_1": ["w", "x"], "text_2": ["y", "z"]}, ["w", "x"], ["y", "z"]),
        ({"text_1": None, "queries": "q"}, ["q"], ["y"]),
        ({"text_2": None, "documents": ["d", "e"]}, ["x"], ["d", "e"]),
    ],
)
def test_texts_are_scored_one_against_all_or_each_against_its_own(
    given: dict[str, Any], first: list[str], second: list[str]
) -> None:
    body = score(**given)
    assert (body.first, body.second) == (first, second)
    wanted = [(first[n % len(first)], text) for n, text in enumerate(second)]
    assert body.pairs == wanted


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"text_1": ""}, "text_1", "invalid_value"),
        ({"text_1": []}, "text_1", "invalid_value"),
        ({"text_2": ["a", ""]}, "text_2", "invalid_value"),
        ({"text_1": 5}, "text_1", "invalid_type"),
        ({"text_2": ["a", 5]}, "text_2.1", "invalid_type"),
        ({"text_2": [[1, 2]]}, "text_2.0", "invalid_type"),
        ({"text_1": None}, "text_1", "missing_required_parameter"),
        ({"text_2": None}, "text_2", "missing_required_parameter"),
        ({"queries": "q"}, "queries", "invalid_value"),
        ({"documents": ["d"]}, "documents", "invalid_value"),
        ({"text_1": ["a", "b"]}, "text_2", "invalid_value"),
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_2", "invalid_value"),
        ({"text_2": TOO_MANY}, "text_2", "invalid_value"),
        ({"text_1": None, "queries": TOO_MANY}, "queries", "invalid_value"),
        ({"text_1": None, "queries": 5}, "queries", "invalid_type"),
    ],
)
def test_a_fault_of_a_score_body_is_named_as_the_client_wrote_it(
    given: dict[str, Any], param: str, code: str
) -> None:
    assert fault_of(score, **given) == (param, code)


def test_documents_are_texts_or_objects_that_hold_one() -> None:
    body = rerank(documents=["a", {"text": "b"}], top_n=1, return_documents=True)
    assert (body.first, body.second) == (["x"], ["a", "b"])
    assert body.pairs == [("x", "a"), ("x", "b")]


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"query": ""}, "query", "invalid_value"),
        ({"query": ["x"]}, "query", "invalid_type"),
        ({"query": None}, "query", "missing_required_parameter"),
        ({"documents": []}, "documents", "invalid_value"),
        ({"documents": [""]}, "documents", "invalid_value"),
        ({"documents": "y"}, "documents", "invalid_type"),
        ({"documents": None}, "documents", "missing_required_parameter"),
        ({"documents": ["y", 5]}, "documents.1", "invalid_type"),
        ({"documents": [{"text": ""}]}, "documents.0.text", "invalid_value"),
        ({"documents": [{"title": "y"}]}, "documents.0.text", "missing_required_parameter"),
        ({"documents": [{"text": "y", "id": 1}]}, "documents.0.id", "unknown_parameter"),
        ({"documents": TOO_MANY}, "documents", "invalid_value"),
        ({"top_n": 0}, "top_n", "invalid_value"),
        ({"top_n": "1"}, "top_n", "invalid_type"),
        ({"return_documents": 1}, "return_documents", "invalid_type"),
    ],
)
def test_a_fault_of_a_rerank_body_is_named(given: dict[str, Any], param: str, code: str) -> None:
    assert fault_of(rerank, **given) == (param, code)


def test_an_image_is_not_moderated() -> None:
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    assert fault_of(moderation, input=[image]) == ("input.0", "invalid_type")
    assert moderation(input="x").input == ["x"]


def test_every_parameter_of_the_official_client_is_known() -> None:
    params = moderation_create_params.ModerationCreateParams
    assert set(params.__annotations__) <= set(ModerationBody.model_fields)


@pytest.mark.parametrize("call", ALL)
def test_of_every_body_the_common_rules_hold(call: Any) -> None:
    assert call(user="u", metadata={"a": "b"}).user == "u"
    assert call(user=None, anything=None) == call()
    assert fault_of(call, user=5) == ("user", "invalid_type")
    assert fault_of(call, temperatur=0) == ("temperatur", "unknown_parameter")
    assert fault_of(call, temperature=0) == ("temperature", "unsupported_parameter")
    assert fault_of(call, rules=LENIENT, stop="x") == ("stop", "unsupported_parameter")
    assert call(rules=LENIENT, temperatur=0) == call()
    assert call(truncate=True).truncate is True
