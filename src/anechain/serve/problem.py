"""What goes wrong with a request, as the OpenAI API says it: an HTTP status and a body with one `error` object."""

from dataclasses import dataclass
from typing import Any

from anechain.errors import AnechainError, RequestError


@dataclass(eq=False)
class Problem(Exception):
    """`param` names the field at fault, `code` is what programs test for. `headers` go with the answer."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def problem_of(error: BaseException, param: str | None = None) -> Problem:
    """Any failure as a Problem. What is not a refusal of this project is named by its type alone: it may hold data."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestError):
        return Problem(400, str(error), param=param)
    if isinstance(error, AnechainError):
        return Problem(500, str(error), "server_error", code="engine_error")
    return Problem(500, f"the request failed inside the server ({type(error).__name__}).", "server_error")
