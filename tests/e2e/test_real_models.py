"""Does a file go in and come out, on the real models, and whatever is killed meanwhile?"""

import base64
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai.types import Batch, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from sentence_transformers import SentenceTransformer

from service.catalog import DEFAULT_CATALOG, Catalog
from service.settings import Files
from tests.e2e.conftest import Stack

EXAMPLES = Path(__file__).parents[2] / "examples"
TERMINAL = {"completed", "failed", "expired", "cancelled"}
DEADLINE_S = 300


def example(name: str, lines: int) -> list[dict[str, Any]]:
    """The first lines of one of the shipped examples."""
    text = (EXAMPLES / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()[:lines]]


def submit(client: openai.OpenAI, requests: Sequence[dict[str, Any]]) -> Batch:
    """Upload the requests and create their batch."""
    data = b"".join(json.dumps(request).encode() + b"\n" for request in requests)
    file = client.files.create(file=("input.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=requests[0]["url"], completion_window="24h"
    )


def await_batch(
    client: openai.OpenAI, batch_id: str, until: Callable[[Batch], bool] | None = None
) -> Batch:
    """Poll until the batch has ended, or `until` holds."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        batch = client.batches.retrieve(batch_id)
        if batch.status in TERMINAL or (until is not None and until(batch)):
            return batch
        time.sleep(0.1)
    pytest.fail(f"batch {batch_id} did not end in {DEADLINE_S} s")


def results(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of a result file."""
    assert file_id is not None
    content = client.files.content(file_id).content
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def counts(batch: Batch) -> tuple[int, int, int]:
    """total, completed, failed."""
    assert batch.request_counts is not None
    found = batch.request_counts
    return found.total, found.completed, found.failed


def test_embeddings_equal_those_of_sentence_transformers(client: openai.OpenAI) -> None:
    requests = example("embeddings", 60)
    requests[7]["body"]["encoding_format"] = "base64"
    batch = await_batch(client, submit(client, requests).id)
    assert (batch.status, batch.error_file_id, counts(batch)) == ("completed", None, (60, 60, 0))
    lines = results(client, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [each["custom_id"] for each in requests]
    for line in lines:
        (item,) = line["response"]["body"]["data"]
        if isinstance(item["embedding"], str):
            item["embedding"] = np.frombuffer(base64.b64decode(item["embedding"]), "<f4").tolist()
    bodies = [CreateEmbeddingResponse.model_validate(line["response"]["body"]) for line in lines]
    vectors = [body.data[0].embedding for body in bodies]
    model = Catalog.load(DEFAULT_CATALOG).get("all-minilm-l6-v2")
    assert model is not None
    reference = SentenceTransformer(str(model.folder(Files().models)), device="cpu")
    expected = reference.encode([each["body"]["input"] for each in requests])
    assert np.abs(np.array(vectors) - expected).max() <= 1e-5
    assert batch.usage is not None
    assert batch.usage.total_tokens == sum(body.usage.total_tokens for body in bodies)


def test_chat_lines_are_answered_and_paid_at_half_the_rate(client: openai.OpenAI) -> None:
    requests = example("tagging", 6)
    requests[2]["body"]["temperature"] = 9  # refused alone
    batch = await_batch(client, submit(client, requests).id)
    assert (batch.status, counts(batch)) == ("completed", (6, 5, 1))
    lines = results(client, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [
        each["custom_id"] for each in requests if each["body"]["temperature"] == 0
    ]
    for line in lines:
        answer = ChatCompletion.model_validate(line["response"]["body"])
        assert answer.choices[0].message.content
        assert answer.usage is not None
        assert 1 <= answer.usage.completion_tokens <= requests[0]["body"]["max_tokens"]
    (refused,) = results(client, batch.error_file_id)
    assert refused["custom_id"] == requests[2]["custom_id"]
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert batch.model_extra is not None
    cost = batch.model_extra["halfrate"]["cost"]
    assert 2 * float(cost["paid"]) == pytest.approx(float(cost["standard"]))


def caught_in_mid_batch(client: openai.OpenAI) -> tuple[list[dict[str, Any]], Batch]:
    """A batch some of whose lines are answered and others not; as large as that takes here."""
    copies = 8
    while True:
        # Texts differ: those that stand twice would be computed once.
        requests = [
            {
                **request,
                "custom_id": f"{request['custom_id']}-{copy}",
                "body": {**request["body"], "input": f"{copy}: {request['body']['input']}"},
            }
            for copy in range(copies)
            for request in example("embeddings", 328)
        ]
        batch = submit(client, requests)
        found = await_batch(client, batch.id, lambda found: counts(found)[1] > 0)
        if found.status == "in_progress":
            return requests, batch
        copies *= 2


@pytest.mark.parametrize("part", ["engine.all-minilm-l6-v2", "cpu", "valkey"])
def test_nothing_is_lost_when_a_part_is_killed_in_mid_batch(
    stack: Stack, client: openai.OpenAI, part: str
) -> None:
    requests, batch = caught_in_mid_batch(client)
    before = stack.part(part)
    os.kill(before["pid"], signal.SIGKILL)
    ended = await_batch(client, batch.id)
    total = len(requests)
    assert (ended.status, counts(ended)) == ("completed", (total, total, 0))
    lines = results(client, ended.output_file_id)
    assert [line["custom_id"] for line in lines] == [each["custom_id"] for each in requests]
    after = stack.part(part)
    assert after["restarts"] == before["restarts"] + 1
    assert after["pid"] != before["pid"]
