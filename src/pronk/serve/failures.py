"""ApiError: what a client is told when its request cannot be answered, in OpenAI's form or in Anthropic's."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pronk.engine.grammar import Ungrammatical
from pronk.errors import (
    BadFile,
    BadRequest,
    ContextOverflow,
    NotEnoughMemory,
    NoTokenizer,
    PronkError,
    Unsupported,
    out_of_memory,
)
from pronk.terminal import shown_in_line

log = logging.getLogger("pronk.serve")

ANTHROPIC = "/v1/messages"  # what begins so is Anthropic's
RESPONSES = "/v1/responses"
RETRY_AFTER = 1  # seconds; a text takes about as long
# Anthropic's word for a status: https://docs.anthropic.com/en/api/errors
_ANTHROPIC = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """`param`: the field that is at fault. `code`: a word that clients look for."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.logged = False  # and by that nobody need log it again
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", str(RETRY_AFTER))
        elif status < 500:
            self.headers.setdefault("x-should-retry", "false")  # OpenAI's clients would try a 409 or 408 again

    @property
    def kind(self) -> str:
        if self.status in (429, 503):
            return "rate_limit_error" if self.status == 429 else "service_unavailable_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def told(self, path: str) -> dict[str, Any]:
        """In the form that clients of that path read."""
        return self.anthropic() if path.startswith(ANTHROPIC) else self.openai()

    def streamed(self, path: str) -> dict[str, Any]:
        """The same as the data of an event named error, which the Responses API has without a frame."""
        if not path.startswith(RESPONSES):
            return self.told(path)
        fault = {"code": self.code, "message": self.message, "param": self.param}
        return {"type": "error", "sequence_number": 0, **fault}

    def openai(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        kind = _ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def overloaded(what: str) -> ApiError:
    return ApiError(429, f"the server is at work on as many requests as it takes: {what}; try again", code="overloaded")


def of(error: BaseException) -> ApiError:
    """What `error` is to a client. Of what is nobody's fault but ours, no word goes out."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextOverflow):
        message = (
            f"This model's maximum context length is {error.context} tokens, and the prompt has "
            f"{error.prompt_tokens} tokens; shorten it"
        )
        return ApiError(400, message, getattr(error, "at_fault", "messages"), "context_length_exceeded")
    if isinstance(error, NotEnoughMemory) or out_of_memory(error):
        return ApiError(503, f"the server's memory does not suffice: {getattr(error, 'problem', 'it ran out')}")
    if isinstance(error, BadRequest | Unsupported | NoTokenizer | BadFile | Ungrammatical):
        return ApiError(400, str(error), getattr(error, "at_fault", None))
    if isinstance(error, PronkError):
        return ApiError(500, str(error))
    return ApiError(500, "the server failed at this request, which its log tells of")


def amid(error: Exception) -> ApiError:
    """The same, of an answer whose status has gone out: the log tells of what is ours here."""
    told = of(error)
    if told.status >= 500:
        log_failure("a stream failed", error)
    return told


def log_failure(what: str, error: Exception) -> None:
    """What has a word of its own needs no more than that; of all else the log tells where it was."""
    worded = isinstance(error, ApiError | PronkError)
    log.error("%s%s", what, f": {shown_in_line(str(error))}" if worded else "", exc_info=None if worded else error)


@contextmanager
def about(param: str | None, *fields: str) -> Iterator[None]:
    """What a model or its template refuses within is the fault of that field, or of the one of `fields` that the word
    begins with."""
    try:
        yield
    except PronkError as error:
        word = str(error).partition(" ")[0]
        error.at_fault = word if word in fields else param  # type: ignore[attr-defined]  # it stays what it is
        raise


@contextmanager
def renamed(fields: Mapping[str, str]) -> Iterator[None]:
    """Errors within name a chat's fields; outside, those of another API that they were made of."""
    try:
        yield
    except (ApiError, PronkError) as error:
        told = of(error)
        told.param = fields.get(told.param or "", told.param)
        told.message = re.sub(r"\A\w+", lambda word: fields.get(word[0], word[0]), told.message)
        raise told from error
