"""Do faults of a generating engine's lines cost those lines alone, each told as what it is?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig, Kind
from engine.engine import Engine
from engine.errors import TemplateError
from engine.stub import StubTokenizer
from tests import invariants
from tests.pipeline import Pipeline, chat_line, completion_line
from tests.unit.engine.conftest import DECODERS, write_tokenizer

SICK, LARGE = 7, 8  # tokens
CONTEXT = 96


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder, for which one token is no number."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(DECODERS["llama"]())
    model.save_pretrained(folder)
    write_tokenizer(folder, ends=False)
    return folder


class Short:
    """A model that runs out of memory wherever one token is read."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        if (inputs["input_ids"] == LARGE).any():
            msg = "injected"
            raise torch.OutOfMemoryError(msg)
        return self._model(**inputs)


def faulty(folder: Path) -> Engine:
    engine = Engine(EngineConfig(model=folder, kind=Kind.GENERATE, context_length=CONTEXT))
    assert engine.status.path == "packed"
    decoder = engine._loop._decoder
    with torch.inference_mode():
        decoder.model.get_input_embeddings().weight.data[SICK] = float("nan")
    object.__setattr__(decoder, "model", Short(decoder.model))
    return engine


FAULTS: list[tuple[str, bytes, int, str, str, str]] = [
    (
        "too long", completion_line("too long", "x" * 200, max_tokens=5), 400,
        f"This model's maximum context length is {CONTEXT} tokens, but the input has 201 tokens.",
        "prompt", "context_length_exceeded",
    ),
    (
        "too much", completion_line("too much", "x", max_tokens=CONTEXT), 400,
        f"maximum context length is {CONTEXT} tokens, but {CONTEXT + 2} tokens were requested",
        "max_tokens", "context_length_exceeded",
    ),
    (
        "regex", completion_line("regex", "x", max_tokens=5, regex="(["), 400,
        "The grammar cannot be followed", "regex", "invalid_value",
    ),
    (
        "grammar", completion_line("grammar", "x", max_tokens=5, grammar="start: nothing"), 400,
        "The grammar cannot be followed", "grammar", "invalid_value",
    ),
    (
        "not finite", completion_line("not finite", [[1, SICK, 9]], max_tokens=5), 500,
        "The model's scores for this input are not finite.",
        "prompt", "non_finite",
    ),
    (
        "out of memory", completion_line("out of memory", [[1, LARGE, 9]], max_tokens=5), 500,
        "A request of 8 tokens (max_tokens included) does not fit into memory.",
        "prompt",
        "out_of_memory",
    ),
]  # fmt: skip


def test_each_fault_costs_its_own_line_and_no_other(pipeline: Pipeline, tiny: Path) -> None:
    kept_clear = {str(SICK): -100, str(LARGE): -100}
    healthy = [
        completion_line(
            f"fine {n}", f"{n} is", max_tokens=5 + n, temperature=0, logit_bias=kept_clear
        )
        for n in range(8)
    ]
    lines = [*healthy[:4], *(line for _, line, *_ in FAULTS), *healthy[4:]]
    alone = answers(pipeline, tiny, healthy)
    assert len(alone) == len(healthy)
    batch_id = pipeline.submit(lines, "/v1/completions")
    pipeline.finish(batch_id, "stub-chat", make=lambda: faulty(tiny), rounds=24)
    invariants.check(pipeline, batch_id)
    assert texts(pipeline, batch_id) == alone
    errors = {line["custom_id"]: line["response"] for line in pipeline.errors(batch_id)}
    assert set(errors) == {name for name, *_ in FAULTS}
    for name, _, status, message, param, code in FAULTS:
        error = errors[name]["body"]["error"]
        assert (errors[name]["status_code"], error["code"]) == (status, code), name
        assert message in error["message"]
        assert error["param"] == param


def answers(pipeline: Pipeline, tiny: Path, lines: list[bytes]) -> dict[str, str]:
    batch_id = pipeline.submit(lines, "/v1/completions")
    pipeline.finish(batch_id, "stub-chat", make=lambda: faulty(tiny))
    return texts(pipeline, batch_id)


def texts(pipeline: Pipeline, batch_id: Any) -> dict[str, str]:
    return {
        line["custom_id"]: line["response"]["body"]["choices"][0]["text"]
        for line in pipeline.output(batch_id)
    }


def test_a_template_that_fails_costs_its_line_alone(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    render: Callable[..., str] = StubTokenizer.render_chat

    def failing(self: StubTokenizer, messages: list[dict[str, Any]], **more: Any) -> str:
        if messages[0]["content"] == "odd":
            msg = "Conversation roles must alternate"
            raise TemplateError(msg)
        return render(self, messages, **more)

    monkeypatch.setattr(StubTokenizer, "render_chat", failing)
    lines = [chat_line("a"), chat_line("odd", "odd"), chat_line("b")]
    batch_id = pipeline.submit(lines, "/v1/chat/completions")
    pipeline.run("stub-chat")
    invariants.check(pipeline, batch_id)
    assert [line["custom_id"] for line in pipeline.output(batch_id)] == ["a", "b"]
    [line] = pipeline.errors(batch_id)
    error = line["response"]["body"]["error"]
    assert line["response"]["status_code"] == 400
    assert error["param"] == "messages"
    assert error["message"] == (
        "The model's chat template refused the messages: Conversation roles must alternate"
    )
