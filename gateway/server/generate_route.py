"""The generating routes: how each one's body is read, and where engines take it.

Owns that table. Must never: answer a request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.server.foreign import MESSAGES, RESPONSES, Way
from gateway.server.prompt_work import PromptRequest
from worker.prompt.foreign_api import ForeignApi
from worker.prompt.requests import parse_chat, parse_completion, parse_embedding
from worker.prompt.usual_chat import parse_usual_chat


@dataclass(frozen=True, slots=True)
class GenerateRoute:
    """One generating route and how its body is read."""

    path: str
    parse: Callable[[bytes], PromptRequest]
    prompt_param: str
    foreign: ForeignApi | None = None

    @property
    def upstream_path(self) -> str:
        """Where engines take it."""
        return self.path if self.foreign is None else CHAT.path

    def read(self, body: bytes) -> tuple[bytes, PromptRequest, Way | None]:
        """The body for engines, what it says, and the way back."""
        if self.foreign is None:
            return body, self.parse(body), None
        read = self.foreign.read(body)
        return read.body, read.parsed, Way(self.foreign, read.answer)


CHAT = GenerateRoute("/v1/chat/completions", parse_usual_chat, "messages")
COMPLETIONS = GenerateRoute("/v1/completions", parse_completion, "prompt")
EMBEDDINGS = GenerateRoute("/v1/embeddings", parse_embedding, "input")
EXPRESS_ROUTES = {route.path: route for route in (CHAT, COMPLETIONS)}
FOREIGN = {api.path: GenerateRoute(api.path, parse_chat, "messages", api) for api in (MESSAGES, RESPONSES)}
