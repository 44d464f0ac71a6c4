"""Errors in the OpenAI format, the limit on request bodies, and the check of the admin token."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import HTTPException as FastAPIHTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from midflight.errors import (
    GenerationError,
    GenerationLostError,
    NonFiniteWeightsError,
    RequestError,
    WeightUpdateError,
)
from midflight.generation.access import Access, Caller
from midflight.generation.schemas import ErrorDetail, ErrorResponse

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
_LONGEST_INPUT_SHOWN = 60  # characters
_LONGEST_MESSAGE, _LONGEST_PARAM = 1000, 100  # characters; clients choose names of any length

# Keys of an ASGI scope: the client of the request, and the secrets of the server.
CALLER, ACCESS = "midflight.caller", "midflight.access"
BEARER = HTTPBearer(auto_error=False)

# Error responses of every route, for the OpenAPI schema.
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in (
        (400, "The request is not valid; the message names the wrong value"),
        (401, "An API key or the admin token is needed, or the key is wrong or has expired"),
        (403, "The admin token is wrong, or a page of another site has sent the request"),
        (404, "There is no such model"),
        (409, "The request conflicts with one in flight"),
        (413, "The body is too large"),
        (421, "The header Host does not name this server"),
        (429, "The queue is full, or this client has too much in it; try again after Retry-After seconds"),
        (500, "Generation failed while this request was in flight"),
        (503, "Generation has failed and the server must be restarted, or its weights are too old"),
    )
}


class ApiError(Exception):
    """An error response. `param`: the wrong field. `kind`: the error type; default: the type for the status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        kind = kind or _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.status, self.headers = status, headers
        message, param = _safe(message, _LONGEST_MESSAGE), param and _safe(param, _LONGEST_PARAM)
        self.detail = ErrorDetail(message=message, type=kind, param=param, code=code)

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        return ErrorResponse(error=self.detail).model_dump()


def as_api_error(error: Exception) -> ApiError:
    """Convert an exception into an error response; unknown exceptions become a 500."""
    match error:
        case ApiError():
            return error
        case RequestValidationError():
            return _validation_error(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case RequestError():
            return ApiError(400, str(error))
        case WeightUpdateError():
            code = "weights_not_finite" if isinstance(error, NonFiniteWeightsError) else None
            return ApiError(400, str(error), kind="weight_update_error", code=code)
        case GenerationError():
            return ApiError(500, str(error), code="generation_failed")
        case GenerationLostError():
            return ApiError(503, str(error), code="shutting_down")
        case _:
            return ApiError(500, f"{type(error).__name__}: {error}")


def install_error_handlers(app: FastAPI) -> None:
    """Make the application answer every exception in the OpenAI format."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        api_error = as_api_error(error)
        return JSONResponse(api_error.body(), api_error.status, headers=api_error.headers)

    for kind in (
        ApiError, RequestValidationError, HTTPException, RequestError, WeightUpdateError, GenerationError,
        GenerationLostError, Exception,
    ):  # fmt: skip
        app.add_exception_handler(kind, answer)


class BodyLimit:
    """Middleware that refuses a body as soon as it exceeds `max_bytes`, and never holds more than that in memory.

    FastAPI's own `max_body_size` answers in plain text, not in the OpenAI format.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        too_long = (announced_length(dict(scope.get("headers", ()))) or 0) > self._max_bytes
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message: Message = {} if too_long else await receive()
            num_bytes += len(message.get("body", b""))
            if too_long or num_bytes > self._max_bytes:
                # While FastAPI reads a body, it lets only its own HTTPException through.
                raise FastAPIHTTPException(413, f"the body has more than {self._max_bytes} bytes")
            return message

        await self._app(scope, limited if scope["type"] == "http" else receive, send)


def announced_length(headers: Mapping[bytes, bytes]) -> int | None:
    """Return the announced length of a body (bytes); None if it comes in chunks of unknown length."""
    text = headers.get(b"content-length", b"")
    if text.isdigit():
        return int(text)
    return None if b"transfer-encoding" in headers else 0


def may_administer(scope: Scope) -> bool:
    """Return True if the client of this request is the run, or if the server has no admin token."""
    access: Access = scope[ACCESS]
    caller: Caller = scope[CALLER]
    return caller.is_admin or not access.has_admin_token


def require_admin(request: Request, credentials: Annotated[object, Depends(BEARER)] = None) -> None:
    """Check the admin token of a request, if the server has one. `credentials`: only for the documentation.

    Raises: ApiError 401 without a token, 403 with a wrong token.
    """
    if may_administer(request.scope):
        return
    if request.scope[CALLER].credentials == "none":
        raise unauthorized("this needs the header Authorization: Bearer <admin token>")
    raise ApiError(403, "the admin token is wrong")


def unauthorized(message: str, code: str | None = None) -> ApiError:
    """Return the answer to a request without a valid secret."""
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})


def _safe(text: str, longest: int) -> str:
    """Shorten a text, and escape unpaired surrogates, which JSON can contain but UTF-8 cannot encode."""
    if len(text) > longest:
        text = f"{text[:longest]}..."
    return text.encode(errors="backslashreplace").decode()


def _validation_error(error: RequestValidationError) -> ApiError:
    """Describe the most specific of pydantic's errors in one line."""
    deepest = max(error.errors(), key=lambda detail: len(detail["loc"]))
    if deepest["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {deepest['ctx']['error']}", code="invalid_json")
    # The location includes the alternative of a union, which users need not know: "prompt", "list[...]", 0.
    location = ".".join(part for part in map(str, deepest["loc"][1:]) if "[" not in part and part != "str")
    shown = _shown(deepest.get("input"))
    got = f", got {shown}" if shown else ""
    message = f"{location or 'the body'}: {deepest['msg']}{got}"
    return ApiError(400, message, param=location or None, code=deepest["type"])


def _shown(value: Any) -> str:
    """Return a short value as text; "" for a long one, whose text would take long to make."""
    if isinstance(value, str | list | dict) and len(value) > _LONGEST_INPUT_SHOWN:
        return ""
    shown = reprlib.repr(value) if isinstance(value, list | dict) else repr(value)
    return shown if len(shown) <= _LONGEST_INPUT_SHOWN else ""
