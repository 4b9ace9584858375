"""Requests to token ids (interface first; the body is being written)."""

from __future__ import annotations

from worker.prompt.requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from worker.prompt.tokenizer import PromptTokenizer, TokenizerBundle


class PromptRenderer:
    """Renders and tokenises for one model. Thread-safe; long prompts belong in a thread."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        self.bundle = bundle
        self.tokenizer = PromptTokenizer(bundle)

    def chat(self, request: ChatRequest) -> list[int]:
        raise AssertionError("being written")

    def completion(self, request: CompletionRequest) -> list[list[int]]:
        raise AssertionError("being written")

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        raise AssertionError("being written")

    def detokenize(self, request: DetokenizeRequest) -> str:
        raise AssertionError("being written")
