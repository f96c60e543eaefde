"""Does the catalog's entry of a model reach its engine and tokenizer?"""

from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import AutoModelForCausalLM

from engine.errors import ModelLoadError
from engine.stub import DIMENSIONS
from service.catalog import Category, Model, ModelKind, Moderation
from tests.unit.engine.conftest import SMALL, write_tokenizer
from worker.engines import engine_of
from worker.settings import WorkerSettings
from worker.tokenizers import tokenizer_of


def model(**given: Any) -> Model:
    return Model(id="m", source="stub:", price_input="1", **given)


def test_an_engine_is_made_as_the_catalog_and_the_settings_say(tmp_path: Path) -> None:
    entry = model(kind=ModelKind.EMBED, context_length=64, dimensions=(4,))
    engine = engine_of(entry, tmp_path, WorkerSettings(token_budget=99))
    assert (engine.context_length, engine.smaller_dimensions) == (64, (4,))
    assert (engine.dimensions, engine.status.token_budget) == (DIMENSIONS, 99)


def test_a_model_that_is_to_be_deterministic_and_cannot_is_not_served(tmp_path: Path) -> None:
    config = transformers.BloomConfig(**SMALL, hidden_size=32, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, ends=False)
    entry = {
        "id": "m",
        "kind": ModelKind.GENERATE,
        "source": str(tmp_path),
        "price_input": "1",
        "context_length": 64,
    }
    engine_of(Model(**entry), tmp_path, WorkerSettings())
    with pytest.raises(ModelLoadError, match="deterministic"):
        engine_of(Model(**entry, deterministic=True), tmp_path, WorkerSettings())


def test_prompts_of_the_catalog_reach_the_tokenizer(tmp_path: Path) -> None:
    entry = model(kind=ModelKind.EMBED, prompts={"query": "find: ", "passage": "text: "})
    assert tokenizer_of(entry, tmp_path).prompts == {"query": "find: ", "passage": "text: "}


@pytest.mark.parametrize("label", ["positive", "toxic"])
def test_a_mapping_of_a_label_that_the_model_lacks_is_found_at_load(
    tmp_path: Path, label: str
) -> None:
    mapping = Moderation(labels={"negative": Category.HATE, label: Category.HARASSMENT})
    entry = model(kind=ModelKind.CLASSIFY, moderation=mapping)
    if label == "positive":
        assert label in engine_of(entry, tmp_path, WorkerSettings()).labels
    else:
        with pytest.raises(ModelLoadError, match=r"'toxic'.*negative, neutral, positive"):
            engine_of(entry, tmp_path, WorkerSettings())
