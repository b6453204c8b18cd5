"""What the endpoint refuses, in the shapes that OpenAI's and Anthropic's clients understand.

Place in the flow: raised anywhere below a request, turned into a response by `server`. Which status a refusal has is
chosen by what clients do with it: they try 408, 409, 429 and everything from 500 again, and give up on the others.
"""

from __future__ import annotations

from typing import Any

from thundersync.errors import ThundersyncError

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class Refused(ThundersyncError):
    """A request that is not answered. `code` names the reason for programs, `param` the parameter at fault."""

    def __init__(self, message: str, *, status: int = 400, code: str = "", param: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def openai(self) -> dict[str, Any]:
        """The body that OpenAI's clients expect."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param or None, "code": self.code or None}
        return {"error": error}

    def anthropic(self) -> dict[str, Any]:
        """The body that Anthropic's clients expect."""
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class SessionOver(Refused):
    """The session has ended, or never was; no further request of it is answered."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=404, code="session_over")


class ContextFull(Refused):
    """The conversation leaves no room for a reply."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            # Clients know an overflow by OpenAI's own words.
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            code="context_length_exceeded",
            param="messages",
        )
