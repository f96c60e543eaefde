"""Does the service do what its OpenAPI document says, whatever is sent to it?

Requests are generated from the document, valid ones and wrong ones, always the same.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from service.stack.parts import EmbeddedUrls
from tests.integration.api_objects import MAKERS
from tests.integration.api_server import STUBS, Server, api_server, document_of_nowhere

SEED = 1
EXAMPLES = 20
"""Generated for each operation, beside the edges of every field."""

LEFT_OUT = positive_data_acceptance
"""It asks that what has the right shape be taken: an id that names nothing has it too."""

# Query parameters that nobody knows are passed over, as is usual.
CONFIGURATION = """
[generation]
allow-extra-parameters = false
"""


BOUNDED = settings(
    max_examples=EXAMPLES // 2,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


def test_every_answer_is_documented(server: Server, tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION, encoding="utf-8")
    command = [
        str(Path(sys.executable).parent / "schemathesis"),
        "--no-color",
        "run",
        f"{server.url}/openapi.json",
        f"--header=Authorization: Bearer {server.project().key}",
        f"--exclude-checks={LEFT_OUT.__name__}",
        f"--max-examples={EXAMPLES}",
        f"--seed={SEED}",
        "--generation-deterministic",
        "--suppress-health-check=all",
        "--continue-on-failure",
    ]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


DOCUMENT = schemathesis.openapi.from_dict(
    document_of_nowhere(), config=schemathesis.Config.from_dict(tomllib.loads(CONFIGURATION))
)
OF_OBJECTS = {
    operation.label: operation
    for operation in (found.ok() for found in DOCUMENT.get_all_operations())
    if "{" in operation.path
}


@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("label", OF_OBJECTS)
def test_every_answer_about_a_real_object_is_documented(
    server: Server, label: str, mode: GenerationMode
) -> None:
    operation = OF_OBJECTS[label]

    @settings(BOUNDED)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        api = server.project()
        with api.http() as http:
            for name in re.findall(r"{(\w+)}", operation.path):
                case.path_parameters[name] = _made(http, name)
        headers = {"authorization": f"Bearer {api.key}"}
        # The key is put in here, where that check could not take it away.
        left_out = [LEFT_OUT, ignored_auth]
        case.call_and_validate(base_url=api.url, headers=headers, excluded_checks=left_out)

    ask()


def _made(http: httpx.Client, name: str) -> str:
    return "stub-embed" if name == "model_id" else MAKERS[name](http)
