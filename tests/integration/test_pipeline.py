"""Does a batch pass validate, plan, drain, write back and assemble, with every line once?"""

import base64
import time
from collections import Counter
from decimal import Decimal

import numpy as np
import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion

from engine.config import Kind
from service.batch import BatchStatus, LineState
from service.db.models import File
from tests import invariants
from tests.pipeline import Pipeline, chat_line, completion_line, embedding_line
from tests.stand_ins import Watched

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

# One database for all examples is what is wanted: each is a batch of its own.
FEW = settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_every_line_is_answered_once_and_in_input_order(pipeline: Pipeline) -> None:
    lines = [embedding_line(f"id-{n}", "word " * (1 + n * 7 % 40)) for n in range(200)]
    batch_id = pipeline.submit(lines)
    pipeline.run()
    batch = invariants.check(pipeline, batch_id)
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.total, batch.completed, batch.failed) == (200, 200, 0)
    assert [line["custom_id"] for line in pipeline.output(batch_id)] == [
        f"id-{n}" for n in range(200)
    ]
    assert batch.error_file_id is None
    assert {row.state for row in pipeline.line_rows(batch_id)} == {LineState.SUCCEEDED}
    assert batch.model == "stub-embed"


def test_a_batch_of_many_shards_is_in_input_order_too(pipeline: Pipeline) -> None:
    small = pipeline.having(shard_s=0.02)  # 60 tokens a shard
    batch_id = small.submit([embedding_line(f"{n}", "x" * (n * 13 % 50) + "y") for n in range(120)])
    small.run()
    assert len(small.shards(batch_id)) > 30
    invariants.check(small, batch_id)
    assert [line["custom_id"] for line in small.output(batch_id)] == [f"{n}" for n in range(120)]


def test_lines_of_two_models_come_back_in_one_file(pipeline: Pipeline) -> None:
    models = ["stub-embed", "stub-other"]
    lines = [embedding_line(f"{n}", f"text {n}", models[n % 2]) for n in range(30)]
    batch_id = pipeline.submit(lines)
    pipeline.run(*models)
    batch = invariants.check(pipeline, batch_id)
    assert batch.model is None
    output = pipeline.output(batch_id)
    assert [line["custom_id"] for line in output] == [f"{n}" for n in range(30)]
    assert [line["response"]["body"]["model"] for line in output] == models * 15
    assert {shard.model for shard in pipeline.shards(batch_id)} == set(models)


def test_money_is_exact_over_models_of_different_prices(pipeline: Pipeline) -> None:
    lines = [embedding_line("a", "1234", "stub-embed"), embedding_line("b", "1", "stub-other")]
    batch_id = pipeline.submit(lines)
    pipeline.run("stub-embed", "stub-other")
    batch = invariants.check(pipeline, batch_id)
    # The stub counts a token a byte and one at each end.
    assert batch.input_tokens == 6 + 3
    assert batch.standard_cost == Decimal("0.00000012") + Decimal("0.00000021")
    assert batch.paid_cost == Decimal("0.00000006") + Decimal("0.0000001575")


def test_chat_lines_become_the_references_objects(pipeline: Pipeline) -> None:
    lines = [
        chat_line("one", "hello", max_tokens=4),
        chat_line("three", "hello", n=3, max_tokens=5),
        chat_line("stopped", "hello", stop="l"),
        chat_line("default"),
    ]
    batch_id = pipeline.submit(lines, CHAT)
    began = int(time.time()) - 1  # noqa: TID251 - compared with a stamp on the wire
    pipeline.run("stub-chat")
    batch = invariants.check(pipeline, batch_id)
    typed = {
        line["custom_id"]: ChatCompletion.model_validate(line["response"]["body"])
        for line in pipeline.output(batch_id)
    }
    assert {len(each.choices) for name, each in typed.items() if name != "three"} == {1}
    assert [choice.index for choice in typed["three"].choices] == [0, 1, 2]
    usage = typed["three"].usage
    assert usage is not None
    assert usage.completion_tokens == 15
    assert usage.prompt_tokens == len("user: hello\n")
    assert typed["one"].choices[0].finish_reason == "length"
    assert typed["stopped"].choices[0].finish_reason == "stop"
    default = typed["default"].usage
    assert default is not None
    assert default.completion_tokens <= 16
    assert all(each.created >= began for each in typed.values())
    assert batch.output_tokens == sum(
        each.usage.completion_tokens for each in typed.values() if each.usage
    )


def test_completions_answer_every_prompt(pipeline: Pipeline) -> None:
    lines = [
        completion_line("s", "abc", max_tokens=2),
        completion_line("l", ["abc", "xyz"], max_tokens=2, n=2),
        completion_line("t", [97, 98, 99], max_tokens=2),
    ]
    batch_id = pipeline.submit(lines, COMPLETIONS)
    pipeline.run("stub-chat")
    invariants.check(pipeline, batch_id)
    typed = {
        line["custom_id"]: Completion.model_validate(line["response"]["body"])
        for line in pipeline.output(batch_id)
    }
    assert [choice.text for choice in typed["s"].choices] == ["bc"]
    assert [choice.text for choice in typed["l"].choices] == ["bc", "bc", "yz", "yz"]
    assert [choice.text for choice in typed["t"].choices] == ["bc"]


def test_inputs_of_a_line_come_back_in_their_order_in_float_and_base64(pipeline: Pipeline) -> None:
    texts = ["one", "two two", "three three three", "one"]
    lines = [
        embedding_line("f", texts),
        orjson.dumps(
            {
                **orjson.loads(embedding_line("b", texts)),
                "body": {"model": "stub-embed", "input": texts, "encoding_format": "base64"},
            }
        ),
        *(embedding_line(f"s{n}", text) for n, text in enumerate(texts)),
    ]
    batch_id = pipeline.submit(lines)
    pipeline.run()
    invariants.check(pipeline, batch_id)
    found = {line["custom_id"]: line["response"]["body"] for line in pipeline.output(batch_id)}
    typed = CreateEmbeddingResponse.model_validate(found["f"])
    singles = [found[f"s{n}"]["data"][0]["embedding"] for n in range(4)]
    assert [each.embedding for each in typed.data] == singles
    decoded = [
        np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4").tobytes()
        for each in found["b"]["data"]
    ]
    assert decoded == [np.array(row, dtype="<f4").tobytes() for row in singles]
    assert found["f"]["usage"]["prompt_tokens"] == sum(len(text) + 2 for text in texts)


def test_all_lines_failed_is_completed_with_an_error_file_alone(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a", ""), embedding_line("b", [])])
    pipeline.run()
    batch = invariants.check(pipeline, batch_id)
    assert batch.status is BatchStatus.COMPLETED
    assert (batch.completed, batch.failed) == (0, 2)
    assert batch.output_file_id is None
    assert batch.error_file_id is not None
    assert batch.input_tokens == 0


@FEW
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
        min_size=1,
        max_size=20,
        unique=True,
    )
    .map(lambda names: [name[:512] for name in names])
    .filter(lambda names: len(set(names)) == len(names))
)
def test_every_legal_custom_id_comes_back_as_it_was(pipeline: Pipeline, names: list[str]) -> None:
    batch_id = pipeline.submit([embedding_line(name) for name in names])
    pipeline.run()
    assert [line["custom_id"] for line in pipeline.output(batch_id)] == names


def test_unusual_line_separators_are_escaped_in_the_files(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a\u2028b\u2029c\u0085d")])
    pipeline.run()
    batch = pipeline.batch(batch_id)
    with pipeline.resources.database.transaction() as transaction:
        file = transaction.get_one(File, batch.output_file_id)
    data = pipeline.resources.storage.read(file.storage_key).decode()
    assert data.splitlines(keepends=True) == [data]
    assert pipeline.output(batch_id)[0]["custom_id"] == "a\u2028b\u2029c\u0085d"


def test_result_files_are_named_for_the_batch_and_expire(pipeline: Pipeline) -> None:
    batch_id = pipeline.submit([embedding_line("a"), embedding_line("b", "")])
    pipeline.run()
    batch = pipeline.batch(batch_id)
    with pipeline.resources.database.transaction() as transaction:
        output = transaction.get_one(File, batch.output_file_id)
        errors = transaction.get_one(File, batch.error_file_id)
    assert output.filename == f"batch_{batch_id.hex}_output.jsonl"
    assert errors.filename == f"batch_{batch_id.hex}_error.jsonl"
    assert output.purpose == errors.purpose == "batch_output"
    for file in (output, errors):
        assert file.expires_at is not None
        lifetime = file.expires_at - file.created_at
        assert lifetime.total_seconds() == pipeline.resources.settings.file_days * 86_400


def test_twins_without_a_seed_draw_differently_and_a_retry_alike(pipeline: Pipeline) -> None:
    seen: Counter[str] = Counter()
    seeds = []

    class Noting(Watched):
        def submit(self, requests: object) -> None:
            arrived = list(requests)  # type: ignore[call-overload]
            seeds.extend(each.sampling.seed for each in arrived)
            super().submit(arrived)

    lines = [chat_line("a"), chat_line("b"), chat_line("c", seed=5), chat_line("d", seed=5)]
    batch_id = pipeline.submit(lines, CHAT)
    pipeline.validate()
    pipeline.plan()
    pipeline.drain("stub-chat", lambda: Noting(seen, Kind.GENERATE))
    assert len(set(seeds)) == 3
    assert seeds.count(5) == 2
    assert pipeline.finish(batch_id, "stub-chat").status is BatchStatus.COMPLETED
