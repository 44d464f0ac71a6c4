"""Requests generated from the OpenAPI document: every answer is documented; 503 is the only 5xx and asks to retry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from soak import SOAK

if TYPE_CHECKING:
    from contract.conftest import Server

pytestmark = pytest.mark.slow

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]
ROUTES = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("POST", "/abort"),
    ("POST", "/resume"),
    ("POST", "/request_weight_update"),
    ("GET", "/health"),
    ("GET", "/weights"),
    ("GET", "/metrics"),
]
bounded = settings(
    max_examples=60 * SOAK,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def schema(chat_server: Server) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{chat_server.url}/openapi.json")


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_answer_is_documented(schema: BaseSchema, chat_server: Server, method: str, path: str) -> None:
    """Send generated requests to each route; the server still answers a plain request afterwards."""
    statuses = set()

    @bounded
    @given(case=schema[path][method].as_strategy())
    def check(case: Any) -> None:
        response = case.call(timeout=30)
        # Weights that are too old are the only refusal that asks to retry.
        is_too_early = response.status_code == 503 and response.json()["error"]["code"] == "weights_too_old"
        case.validate_response(response, checks=CHECKS[1:] if is_too_early else CHECKS)
        statuses.add(response.status_code)

    check()
    assert statuses
    answer = httpx.post(f"{chat_server.url}/v1/completions", json={"prompt": [5, 6], "max_tokens": 2})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] > 0


def test_every_route_documents_openai_errors(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    routes = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert set(ROUTES) | {("POST", path) for path in ("/pause", "/init_process_group", "/adopt")} == routes
    for path, methods in document["paths"].items():
        for operation in methods.values() if path != "/metrics" else ():
            assert "422" not in operation["responses"]
            refusal = operation["responses"]["400"]["content"]["application/json"]["schema"]
            assert refusal == {"$ref": "#/components/schemas/ErrorResponse"}
