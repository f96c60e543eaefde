"""Does the service do what its OpenAPI document says, whatever is sent to it?

Requests are generated from the document, valid ones and wrong ones, always the same.
"""

import re
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from service.stack.parts import EmbeddedUrls
from tests.integration.api_objects import MAKERS
from tests.integration.api_server import (
    STUBS,
    Api,
    Server,
    api_server,
    document_of_nowhere,
)

EXAMPLES = 15
"""Of each operation."""

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
"""All but those which ask that what has the right shape be taken: an id that names nothing has it
too. Keys and rights are the affair of test_scoping."""

BOUNDED = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def server(urls: EmbeddedUrls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models_toml = tmp_path_factory.mktemp("api") / "models.toml"
    models_toml.write_text(STUBS, encoding="utf-8")
    with api_server(urls, models_toml) as running:
        yield running


def _generated(*, edges: bool) -> schemathesis.BaseSchema:
    """The document as a source of requests; with `edges`, every limit of every field as well."""
    config = SchemathesisConfig.from_dict(
        {
            # Query parameters that nobody knows are passed over, as is usual.
            "generation": {"allow-extra-parameters": False, "with-security-parameters": False},
            "phases": {"coverage": {"enabled": edges}},
        }
    )
    return schemathesis.openapi.from_dict(document_of_nowhere(), config=config)


@_generated(edges=True).parametrize()
@BOUNDED
def test_every_answer_is_documented(case: schemathesis.Case, server: Server) -> None:
    _ask(case, server.project())


@_generated(edges=False).include(path_regex="{").parametrize()
@BOUNDED
def test_every_answer_about_a_real_object_is_documented(
    case: schemathesis.Case, server: Server
) -> None:
    api = server.project()
    with api.http() as http:
        for name in re.findall(r"{(\w+)}", case.operation.path):
            case.path_parameters[name] = _one(http, name)
    _ask(case, api)


def _ask(case: schemathesis.Case, api: Api) -> None:
    headers = {"authorization": f"Bearer {api.key}"}
    case.call_and_validate(base_url=api.url, headers=headers, checks=CHECKS)


def _one(http: httpx.Client, name: str) -> str:
    return "stub-embed" if name == "model_id" else MAKERS[name](http)
