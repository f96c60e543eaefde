"""Do the pages and the commit hooks say what is so?"""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests import settings_table
from tests.containers import DOCKERFILES, PROJECT, ROOT, SERVICES
from tests.e2e.chaos.faults import FAULTS, ONLY
from tests.e2e.chaos.phases import Phase
from tests.settings_table import PREFIX

PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    # Environments, caches and the stack's state stand in folders with a dot.
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
TABLE = re.compile(r"<!-- settings -->\n(.*?)\n?<!-- /settings -->", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def test_the_readme_has_the_table_of_all_settings() -> None:
    found = TABLE.search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found, "README.md has no <!-- settings --> … <!-- /settings -->"
    # Printed by `python -m tests.settings_table`, to be pasted between the two marks.
    assert found[1].splitlines() == settings_table.table().splitlines()


def test_the_table_shows_defaults_as_they_are_written_into_the_environment() -> None:
    rows = {line.split("|")[1].strip(): line for line in settings_table.table().splitlines()}
    assert "| `8000` |" in rows[f"`{PREFIX}PORT`"]
    assert "| `536870912` (512 MiB) |" in rows[f"`{PREFIX}MAX_FILE_BYTES`"]
    assert "| `30` |" in rows[f"`{PREFIX}LEASE_S`"]
    assert "| `~/.cache/halfrate/models` |" in rows[f"`{PREFIX}MODELS`"]
    assert "| required" in rows[f"`{PREFIX}DATABASE_URL`"]
    assert "| unset |" in rows[f"`{PREFIX}SERVE`"]


def test_every_setting_is_described() -> None:
    assert [name for name, field in settings_table.settings() if not field.description] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_only_settings_that_exist(page: Path) -> None:
    named = set(re.findall(rf"{PREFIX}[A-Z0-9_]*[A-Z0-9]", page.read_text(encoding="utf-8")))
    assert named <= {name for name, _ in settings_table.settings()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_of_a_page_is_broken(page: Path) -> None:
    prose = CODE.sub("", page.read_text(encoding="utf-8"))
    for target in LINK.findall(prose):
        if re.match(r"[a-z]+:", target):  # another site
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        if heading:
            assert heading in anchors(linked), target


def test_every_dependency_has_its_line_and_every_line_its_dependency() -> None:
    requirements = [
        *PROJECT["dependencies"],
        *(name for group in PROJECT["optional-dependencies"].values() for name in group),
    ]
    wanted = [re.split(r"[\[<>=~! ]", requirement)[0] for requirement in requirements]
    assert sorted(row[0] for row in rows("package")) == sorted(wanted)


def test_every_container_image_has_its_line_and_every_line_its_image() -> None:
    foreign = {s["image"].split(":")[0] for s in SERVICES.values() if "build" not in s}
    bases = {
        base
        for text in DOCKERFILES.values()
        for base in re.findall(r"^FROM ([^:\s]+):", text, re.MULTILINE)
    }
    assert {row[0] for row in rows("image")} == foreign | bases


def test_every_dependency_has_a_reason_and_a_licence() -> None:
    for row in [*rows("package"), *rows("image")]:
        assert all(row), row


def test_commit_hooks_run_the_installed_tools_as_make_check_does() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    hooks = [hook for repo in yaml.safe_load(text)["repos"] for hook in repo["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^check:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    checks = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe.splitlines()]
    # All but the one that starts a database.
    wanted = [check for check in checks if "alembic" not in check]
    assert [shlex.join(shlex.split(hook["entry"])) for hook in hooks] == wanted


@pytest.mark.parametrize("name", ["reliability.md", "engine-proofs.md"])
def test_every_promise_names_tests_that_exist(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    promises = [line for line in page.splitlines() if line.startswith("| ") and "::" in line]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", promise) for promise in promises]
    assert all(named)
    for path, name in [each for several in named for each in several]:
        written = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(def|class) {name}\(", written, re.MULTILINE), (path, name)


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def rows(heading: str) -> list[list[str]]:
    """The rows of all tables of docs/dependencies.md whose first column is `heading`."""
    found: list[list[str]] = []
    inside = False
    for line in (ROOT / "docs/dependencies.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[0] == heading:
            inside = True
        elif inside and not cells[0].startswith("---"):
            found.append(cells)
    return found


def test_the_table_of_faults_is_complete_and_nothing_is_lost() -> None:
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- chaos -->\n(.*)<!-- /chaos -->", page, re.DOTALL)
    assert found
    _, _, *lines = [line for line in found[1].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == list(FAULTS)
    for name, *costs in cells:
        for phase, cost in zip(Phase, costs, strict=True):
            assert cost.startswith("0 · ") == (phase in ONLY[name]), (name, phase)
