"""Is a models.toml read exactly, and does a faulty one say where its fault is?"""

from decimal import Decimal
from pathlib import Path

import openai.types.moderation
import pytest

from service.catalog import (
    DEFAULT_CATALOG,
    Catalog,
    CatalogError,
    Category,
    HfSource,
    LocalSource,
    ModelKind,
    Moderation,
    PypiSource,
    StubSource,
    endpoints_of,
)

DIGEST = "0123456789ab" + "c" * 52
PYPI = {
    "id": '"m"',
    "kind": '"embed"',
    "source": '"pypi:some-model==1.2!pkg/model"',
    "sha256": f'"{DIGEST}"',
    "price_input": "0.02",
}


def write(folder: Path, *models: dict[str, str], text: str = "") -> Path:
    path = folder / "models.toml"
    tables = [
        "[[models]]\n" + "".join(f"{key} = {value}\n" for key, value in model.items())
        for model in models
    ]
    path.write_text(text + "\n".join(tables))
    return path


def test_the_packaged_catalog_names_the_demo_models() -> None:
    catalog = Catalog.load(DEFAULT_CATALOG)
    kinds = {model.id: model.kind for model in catalog.models}
    assert kinds == {
        "all-minilm-l6-v2": ModelKind.EMBED,
        "all-minilm-l6-v2-int8": ModelKind.EMBED,
        "smollm2-135m-instruct": ModelKind.GENERATE,
    }
    assert all(isinstance(model.origin, PypiSource) for model in catalog.models)
    assert all(model.discount == Decimal("0.5") for model in catalog.models)


def test_a_model_is_found_by_its_id(tmp_path: Path) -> None:
    catalog = Catalog.load(write(tmp_path, PYPI, {**PYPI, "id": '"n"'}))
    assert [model.id for model in catalog.models] == ["m", "n"]
    model = catalog.get("n")
    assert model is not None
    assert model.id == "n"
    assert catalog.get("o") is None


def test_prices_are_exact(tmp_path: Path) -> None:
    entry = {**PYPI, "price_input": "0.1", "price_output": "1e-7", "discount": "0.35"}
    [model] = Catalog.load(write(tmp_path, entry)).models
    assert (model.price_input, model.price_output) == (Decimal("0.1"), Decimal("1e-7"))
    assert model.discount == Decimal("0.35")


def test_each_form_of_source_is_understood(tmp_path: Path) -> None:
    free = {key: value for key, value in PYPI.items() if key != "sha256"}
    catalog = Catalog.load(
        write(
            tmp_path,
            {**PYPI, "id": '"a"'},
            {**free, "id": '"b"', "source": '"hf:owner/name"', "revision": '"abc123"'},
            {**free, "id": '"c"', "source": '"weights/c"'},
            {**free, "id": '"d"', "source": f'"{tmp_path}/d.gguf"'},
            {**free, "id": '"e"', "source": '"stub:"'},
        )
    )
    assert [model.origin for model in catalog.models] == [
        PypiSource("some-model", "1.2", "pkg/model"),
        HfSource("owner/name"),
        LocalSource(tmp_path / "weights" / "c"),
        LocalSource(tmp_path / "d.gguf"),
        StubSource(),
    ]
    cache = Path("cache")
    folders = [model.folder(cache) for model in catalog.models]
    assert folders[0].parent == cache
    assert folders[2] == tmp_path / "weights" / "c"
    assert folders[3].parent == cache
    assert len(set(folders)) == 5


def test_a_changed_source_gets_another_folder(tmp_path: Path) -> None:
    hub = {**PYPI, "source": '"hf:owner/name"', "revision": '"one"'}
    variants = [
        PYPI,
        {**PYPI, "source": '"pypi:some-model==1.3!pkg/model"'},
        {**PYPI, "sha256": f'"{"d" * 64}"'},
        hub,
        {**hub, "revision": '"two"'},
    ]
    folders = {
        Catalog.load(write(tmp_path, entry)).models[0].folder(Path("cache")) for entry in variants
    }
    assert len(folders) == len(variants)


def test_two_models_out_of_one_wheel_share_their_folder(tmp_path: Path) -> None:
    rounded = {**PYPI, "id": '"n"', "quantize": '"int8"'}
    other = {**PYPI, "id": '"o"', "source": '"pypi:some-model==1.2!pkg/other"'}
    plain, int8, beside = (
        model.folder(Path("cache"))
        for model in Catalog.load(write(tmp_path, PYPI, rounded, other)).models
    )
    assert plain == int8 != beside


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": '"Upper"'}, r"'Upper': id: "),
        ({"id": '"../up"'}, r"'\.\./up': id: "),
        ({"id": '""'}, r"'': id: "),
        ({"id": "7"}, r"7: id: "),
        ({"kind": '"chat"'}, r"'m': kind: "),
        ({"source": '"pypi:some-model!pkg"'}, r"'m': source: expected pypi:"),
        ({"source": '"hf:a b"', "revision": '"r"'}, r"'m': source: expected hf:"),
        ({"source": '"hf:owner/name"'}, r"'m': revision: "),
        ({"source": '""'}, r"'m': source: "),
        ({"sha256": '"abc"'}, r"'m': sha256: "),
        ({"dtype": '"int3"'}, r"'m': dtype: "),
        ({"price_input": "-1"}, r"'m': price_input: "),
        ({"price_input": "nan"}, r"'m': price_input: "),
        ({"discount": "1.5"}, r"'m': discount: "),
        ({"context_length": "0"}, r"'m': context_length: "),
        ({"default_max_tokens": "1.5"}, r"'m': default_max_tokens: "),
        ({"prize": "1"}, r"'m': prize: "),
        ({"moderation": '{labels = {a = "hate"}}'}, r"'m': moderation: only"),
        (
            {"kind": '"classify"', "moderation": '{labels = {a = "rude"}}'},
            r"'m': moderation.labels.a: ",
        ),
        ({"kind": '"classify"', "moderation": "{labels = {}}"}, r"'m': moderation.labels: "),
        (
            {"kind": '"classify"', "moderation": '{labels = {a = "hate"}, threshold = 2}'},
            r"'m': moderation.threshold: ",
        ),
    ],
)
def test_a_faulty_model_names_itself_and_the_field(
    tmp_path: Path, change: dict[str, str], said: str
) -> None:
    path = write(tmp_path, {**PYPI, **change})
    with pytest.raises(CatalogError, match=f"model {said}"):
        Catalog.load(path)


@pytest.mark.parametrize("missing", ["id", "kind", "source", "sha256", "price_input"])
def test_a_missing_field_is_named(tmp_path: Path, missing: str) -> None:
    entry = {key: value for key, value in PYPI.items() if key != missing}
    with pytest.raises(CatalogError, match=f"model ('m'|number 1): {missing}: "):
        Catalog.load(write(tmp_path, entry))


def test_an_id_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="'m' is named twice"):
        Catalog.load(write(tmp_path, PYPI, PYPI))


@pytest.mark.parametrize("text", ["models = 3", "model = []", "[[models]", "\x00"])
def test_a_file_that_is_no_catalog_says_so(tmp_path: Path, text: str) -> None:
    with pytest.raises(CatalogError, match=r"models\.toml: "):
        Catalog.load(write(tmp_path, text=text))
    with pytest.raises(CatalogError, match="cannot be read"):
        Catalog.load(tmp_path / "absent.toml")


def kind(name: str, **more: str) -> dict[str, str]:
    return {**PYPI, "kind": f'"{name}"', **more}


@pytest.mark.parametrize(
    ("entry", "endpoints"),
    [
        (kind("generate"), {"/v1/chat/completions", "/v1/completions", "/v1/responses"}),
        (kind("embed"), {"/v1/embeddings", "/v1/classify", "/v1/score", "/v1/rerank"}),
        (kind("classify"), {"/v1/classify"}),
        (
            kind("classify", moderation='{labels = {toxic = "harassment"}}'),
            {"/v1/classify", "/v1/moderations"},
        ),
        (kind("token_classify"), {"/v1/classify"}),
        (kind("score"), {"/v1/score", "/v1/rerank"}),
    ],
)
def test_endpoints_follow_from_the_kind(
    tmp_path: Path, entry: dict[str, str], endpoints: set[str]
) -> None:
    catalog = Catalog.load(write(tmp_path, entry))
    [model] = catalog.models
    assert endpoints_of(model) == endpoints
    for endpoint in endpoints:
        assert catalog.serving(endpoint) == {"m"}


def test_categories_are_the_references() -> None:
    assert set(Category) == {
        field.alias or name
        for name, field in openai.types.moderation.Categories.model_fields.items()
    }


def test_a_mapping_of_labels_has_a_threshold_for_all_and_for_one(tmp_path: Path) -> None:
    table = (
        '{labels = {toxic = "harassment", threat = "harassment/threatening"}, '
        'threshold = 0.75, thresholds = {"harassment/threatening" = 0.25}}'
    )
    [model] = Catalog.load(write(tmp_path, kind("classify", moderation=table))).models
    assert model.moderation == Moderation(
        labels={"toxic": Category.HARASSMENT, "threat": Category.HARASSMENT_THREATENING},
        threshold=0.75,
        thresholds={Category.HARASSMENT_THREATENING: 0.25},
    )
    [model] = Catalog.load(
        write(tmp_path, kind("classify", moderation='{labels = {toxic = "hate"}}'))
    ).models
    assert model.moderation is not None
    assert (model.moderation.threshold, model.moderation.thresholds) == (0.5, {})
