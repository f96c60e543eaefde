"""How does `halfrate doctor` tell what is wrong, and mend it?"""

from contextlib import closing
from pathlib import Path

import orjson
from pydantic import ValidationError

from service import doctor as examining
from service.cli.console import CommandError, say
from service.cli.database import opened
from service.settings import PartUrls, Settings
from service.stack.home import Home
from service.stack.record import read_record
from service.storage import Storage, StorageError


def doctor(home: Path, *, fix: bool, as_json: bool) -> None:
    """Say a line for each finding; mend what can be mended where that is asked for.

    Raises:
        CommandError: something is left that is wrong, or a part does not answer.
    """
    settings = _settings(home)
    left = 0
    with opened(home) as database, closing(Storage.from_settings(settings)) as storage:
        patient = examining.Patient(database, storage, settings.lease)
        try:
            for finding in examining.examine(patient):
                mended = fix and finding.mend is not None
                if mended and finding.mend is not None:
                    finding.mend()
                left += not mended
                _tell(finding, mended=mended, as_json=as_json)
        except StorageError as error:
            raise CommandError(f"The object store does not answer: {error}") from error
    if left:
        raise CommandError(f"{left} findings are left.{'' if fix else ' --fix mends what it can.'}")
    if not as_json:
        say("All is well.")


def _tell(finding: examining.Finding, *, mended: bool, as_json: bool) -> None:
    if as_json:
        shown = {
            "check": finding.check,
            "what": finding.what,
            "remedy": finding.remedy,
            "mendable": finding.mend is not None,
            "mended": mended,
        }
        say(orjson.dumps(shown).decode())
        return
    verb = "mended" if mended else ("--fix would" if finding.mend is not None else "to do")
    say(f"{finding.check}: {finding.what}. {verb}: {finding.remedy}")


def _settings(home: Path) -> Settings:
    """Those of the environment, where it names a database, else those of the home's stack."""
    try:
        if PartUrls().database_url is not None:
            return Settings()
        recorded = read_record(Home.at(home)).environment
        return Settings.model_validate(
            {name.removeprefix("HALFRATE_").lower(): value for name, value in recorded.items()}
        )
    except ValidationError as error:
        names = ", ".join(f"HALFRATE_{str(each['loc'][0]).upper()}" for each in error.errors())
        raise CommandError(
            f"Not set or not usable: {names}. Set them, or run `halfrate up --home {home}` first."
        ) from error
