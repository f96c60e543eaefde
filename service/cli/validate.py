"""What would the service find wrong with an input file? Pure checks: no server, no tokenizer."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import orjson
import typer

from service import lines
from service.bodies import check
from service.bodies.check import InvalidBody, Rules
from service.catalog import Catalog, CatalogError, ModelKind
from service.cli.console import CommandError, say
from service.jsonl import RawLine, split
from service.lines import LineError, ValidLine
from service.settings import MIB, Limits


class Fails(StrEnum):
    """What a fault costs: the whole file, or the line it stands on."""

    FILE = "file"
    LINE = "line"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault. `line` is 1-based; None where the file as a whole is meant."""

    line: int | None
    code: str
    param: str | None
    message: str
    fails: Fails


def validate(path: Path, endpoint: str, *, as_json: bool) -> None:
    """Print what is found; exit with 1 where there is anything."""
    limits = Limits()
    try:
        catalog = Catalog.load(limits.catalog)
    except CatalogError as error:
        raise CommandError(str(error)) from error
    known = sorted(check.SHAPES)
    if endpoint not in known:
        raise CommandError(f"{endpoint} is no endpoint of a batch; there are: {', '.join(known)}.")
    costs: set[Fails] = set()
    number = 0
    try:
        for found in findings(_chunks(path), endpoint=endpoint, catalog=catalog, limits=limits):
            number += 1
            costs.add(found.fails)
            say(json.dumps(asdict(found)) if as_json else _told(found))
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}.") from error
    if not as_json:
        say(_summary(number, costs))
    if number:
        raise typer.Exit(1)


def findings(
    chunks: Iterable[bytes], *, endpoint: str, catalog: Catalog, limits: Limits
) -> Iterator[Finding]:
    """Every fault in line order, as validation and the run would tell it. Too long a prompt, which
    only the model's tokenizer knows, is not among them."""
    served = catalog.serving(endpoint)
    rules = Rules.of(limits)
    seen: set[str] = set()
    requests = 0
    for found in split(chunks, limit=limits.max_line_bytes):
        requests += 1
        checked = _checked(found, endpoint, served, limits)
        if isinstance(checked, LineError):
            yield _of_file(checked)
        custom_id = _custom_id(found, checked)
        if custom_id in seen:
            yield _of_file(lines.duplicate(custom_id, found.number))
        elif custom_id is not None:
            seen.add(custom_id)
        if isinstance(checked, ValidLine):
            model = catalog.get(checked.model)
            if model is not None:
                yield from _of_body(found, endpoint, rules, model.kind)
    if requests == 0:
        yield _of_file(lines.EMPTY_FILE)
    if requests > limits.max_lines:
        yield _of_file(lines.too_many_lines(requests, limits.max_lines))


def _checked(
    found: RawLine, endpoint: str, served: frozenset[str], limits: Limits
) -> ValidLine | LineError:
    if found.raw is None:
        return lines.too_large(found.number, found.length, limits.max_line_bytes)
    return lines.check_line(
        found.raw, line=found.number, endpoint=endpoint, serves=served.__contains__
    )


def _custom_id(found: RawLine, checked: ValidLine | LineError) -> str | None:
    if isinstance(checked, ValidLine):
        return checked.custom_id
    return None if found.raw is None else lines.custom_id_of(found.raw)


def _of_body(found: RawLine, endpoint: str, rules: Rules, kind: ModelKind) -> Iterator[Finding]:
    try:
        check.body(
            orjson.loads(found.raw or b"")["body"], endpoint=endpoint, rules=rules, kind=kind
        )
    except InvalidBody as invalid:
        fault = invalid.fault
        yield Finding(found.number, fault.code, fault.param, fault.message, Fails.LINE)


def _of_file(error: LineError) -> Finding:
    return Finding(error.line, error.code, error.param, error.message, Fails.FILE)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(MIB):
            yield chunk


def _told(found: Finding) -> str:
    where = "The file" if found.line is None else f"Line {found.line}"
    what = found.code if found.param is None else f"{found.code}, {found.param}"
    return f"{where} ({what}): {found.message}"


def _summary(number: int, costs: set[Fails]) -> str:
    if number == 0:
        return "Nothing is wrong. Whether every prompt fits its model shows when it is tokenised."
    if Fails.FILE in costs:
        return f"{number} faults. The batch would fail as a whole."
    return f"{number} faults. These lines would fail, and the others run."
