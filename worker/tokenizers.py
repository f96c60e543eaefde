"""Which tokenizer belongs to a model of the catalog? Needs no torch: CPU workers plan by it."""

from pathlib import Path

from engine.stub import StubTokenizer
from engine.surface import TokenizerLike
from engine.tokenizer import Tokenizer
from service.catalog import Model, StubSource
from worker.models import pull


def tokenizer_of(model: Model, models_dir: Path) -> TokenizerLike:
    """The model's tokenizer; its files are fetched where they are not yet in the cache."""
    if isinstance(model.origin, StubSource):
        return StubTokenizer(model.prompts)
    return Tokenizer.from_dir(pull(model, models_dir), prompts=model.prompts)
