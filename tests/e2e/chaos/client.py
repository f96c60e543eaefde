"""What does a client of the service send, see, and count on? Its files are what is judged."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import EngineConfig, Kind
from engine.request import Embedding, EncodeRequest
from engine.stub import StubEngine, StubTokenizer
from service.ids import Prefix, parse
from tests.e2e.chaos.engine import HELD
from tests.e2e.chaos.phases import (
    AtStore,
    Hold,
    InBody,
    InEngine,
    InPostgres,
    Phase,
    persistently,
)
from tests.e2e.chaos.stack import MODEL, Stack, until

FREE, HELD_LINES = 20, 20
ENDS_WITHIN_S = 120.0
TERMINAL = {"completed", "failed", "expired", "cancelled"}


@dataclass(frozen=True)
class Sent:
    """An input file and what should come of it: half its lines short, half held by the engine where
    it is told to, and one that is refused."""

    word: str
    texts: dict[str, str]  # by custom_id
    refused: str

    @classmethod
    def of(cls, word: str) -> "Sent":
        free = {f"free-{n}": f"{word} {n}" for n in range(FREE)}
        held = {f"held-{n}": f"{HELD} {word} {n} {'x' * 40}" for n in range(HELD_LINES)}
        return cls(word, free | held, "refused")

    @property
    def data(self) -> bytes:
        inputs: dict[str, object] = {**self.texts, self.refused: 5}
        return b"".join(
            json.dumps(
                {
                    "custom_id": name,
                    "method": "POST",
                    "url": "/v1/embeddings",
                    "body": {"model": MODEL, "input": text},
                }
            ).encode()
            + b"\n"
            for name, text in inputs.items()
        )


def hold(stack: Stack, phase: Phase, sent: Sent) -> Hold:
    match phase:
        case Phase.UPLOAD:
            return InBody(sent.data)
        case Phase.VALIDATE | Phase.PLAN | Phase.WRITE_BACK:
            return InPostgres(stack, phase.replace(" ", "_"))
        case Phase.DRAIN:
            return InEngine(stack, FREE)
        case Phase.ASSEMBLE:
            return AtStore(stack)


# --- What a client does ---


def upload(stack: Stack, sent: Sent) -> str:
    form: dict[str, Any] = {"files": {"file": ("a.jsonl", sent.data)}, "data": {"purpose": "batch"}}
    return str(persistently(stack, lambda http: http.post("files", **form)).json()["id"])


def upload_slowly(stack: Stack, hold: InBody, sent: Sent) -> str:
    """The body in two halves. A client whose upload broke sends it again as a whole."""

    def parts() -> Iterator[bytes]:
        yield b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        yield from hold.body()
        yield b"\r\n--x--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=x", "idempotency-key": sent.word}
    return str(
        persistently(
            stack, lambda http: http.post("files", content=parts(), headers=headers)
        ).json()["id"]
    )


def create(stack: Stack, file: str) -> str:
    body = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
    headers = {"idempotency-key": f"create {file}"}
    reply = persistently(stack, lambda http: http.post("batches", json=body, headers=headers))
    return str(reply.json()["id"])


def ended(stack: Stack, batch: str, *, within_s: float = ENDS_WITHIN_S) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def is_over() -> bool:
        found.update(persistently(stack, lambda http: http.get(f"batches/{batch}")).json())
        return found["status"] in TERMINAL

    until(is_over, within_s, f"{batch} ended")
    return found


def lines(stack: Stack, file: str | None) -> list[dict[str, Any]]:
    if file is None:
        return []
    content = persistently(stack, lambda http: http.get(f"files/{file}/content")).content
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


# --- What must hold ---


@dataclass(frozen=True)
class Files:
    """What a client reads of an ended batch; `lost` are the lines that stand in neither file."""

    output: list[str]
    refused: list[str]
    never_ran: list[str]
    lost: list[str]


def check_files(stack: Stack, sent: Sent, batch: dict[str, Any]) -> Files:
    """CONTRACT.md's invariant, and that every answer is its own line's."""
    output, errors = lines(stack, batch["output_file_id"]), lines(stack, batch["error_file_id"])
    order = {name: place for place, name in enumerate([*sent.texts, sent.refused])}
    for file in (output, errors):
        places = [order[line["custom_id"]] for line in file]
        assert places == sorted(set(places))
    names = [line["custom_id"] for line in output + errors]
    assert len(names) == len(set(names))
    refused = [line["custom_id"] for line in errors if line["response"] is not None]
    never_ran = [line["custom_id"] for line in errors if line["response"] is None]
    counts = batch["request_counts"]
    assert (counts["completed"], counts["failed"]) == (len(output), len(refused))
    vectors = expected_vectors(sent)
    for line in output:
        body = line["response"]["body"]
        assert np.allclose(body["data"][0]["embedding"], vectors[line["custom_id"]], atol=1e-6)
    tokens = sum(line["response"]["body"]["usage"]["prompt_tokens"] for line in output)
    assert batch["usage"]["input_tokens"] == tokens
    accepted = order.keys() if counts["total"] else set()
    assert counts["total"] == len(accepted)
    lost = sorted(accepted - set(names))
    return Files([line["custom_id"] for line in output], refused, never_ran, lost)


def check_rest(stack: Stack, batch: str) -> None:
    """No stage or shard of it is left to do; of its parts and unpublished results nothing is."""
    for table in ("stages", "shards"):
        left = f"SELECT 1 FROM {table} WHERE batch_id = %s AND state IN ('ready', 'leased')"  # noqa: S608
        until(lambda query=left: not stack.query(query, batch), 60, f"no {table} left")
    published = stack.query(
        "SELECT storage_key FROM files JOIN batches ON files.id IN (output_file_id, error_file_id)"
        " WHERE batches.id = %s",
        batch,
    )
    found = [*stack.storage.list(f"parts/{batch}/"), *stack.storage.list(f"results/{batch}/")]
    assert sorted(found) == sorted(key for (key,) in published)


def expected_vectors(sent: Sent) -> dict[str, Any]:
    tokens = StubTokenizer().encode(list(sent.texts.values()))
    engine = StubEngine(EngineConfig(model=Path(), kind=Kind.EMBED))
    requests = [EncodeRequest(id=n, tokens=tuple(ids)) for n, ids in enumerate(tokens)]
    names = list(sent.texts)
    found = {}
    for index, result in engine.run(requests):
        assert isinstance(result, Embedding)
        found[names[index]] = result.vector
    return found


def raw_id(batch: str) -> str:
    value = parse(Prefix.BATCH, batch)
    assert value is not None
    return value.hex
