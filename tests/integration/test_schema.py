"""Does the service do what its OpenAPI document says, whatever is sent to it?

Requests are generated from the document, valid ones and wrong ones, always the same.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.stack.parts import EmbeddedUrls
from tests.integration.api_server import (
    STUBS,
    Server,
    api_server,
)

SEED = 1
EXAMPLES = 20
"""Generated for each operation, beside the edges of every field."""

LEFT_OUT = {
    # That what has the right shape is taken: an id that names nothing has it too.
    "positive_data_acceptance",
}

# Query parameters that nobody knows are passed over, as is usual.
CONFIGURATION = """
[generation]
allow-extra-parameters = false
"""


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
        f"--exclude-checks={','.join(LEFT_OUT)}",
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
