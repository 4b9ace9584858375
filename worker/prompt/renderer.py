"""Requests to token ids: the one place where a request meets a model's template and tokenizer.

Owns the choice of template and what is added to a text before encoding. Gateway and worker call the same code, so
that a prompt has the same ids, and the same block hashes, wherever it is rendered.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from worker.prompt.chat_template import ChatTemplate
from worker.prompt.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from worker.prompt.segment_encoder import KnownText, Replies
from worker.prompt.tokenizer import TEXT_MEMORY_BYTES, PromptTokenizer, TokenizerBundle
from worker.prompt.tool_style import style_of_template
from worker.protocol.api_error import ApiError, invalid_request

TOOL_TEMPLATE = "tool_use"
COUNTED_MAX = 1 << 20   # characters, or ids, of a text that need not fit a context: about a second's work


class PromptRenderer:
    """Renders and tokenises for one model. Safe to use from several threads, where long prompts belong."""

    def __init__(self, bundle: TokenizerBundle, *, memory_bytes: int = TEXT_MEMORY_BYTES) -> None:
        self.bundle = bundle
        self.tokenizer = PromptTokenizer(bundle, memory_bytes=memory_bytes)
        self._templates = {name: ChatTemplate(source, bundle.special_tokens)
                           for name, source in bundle.chat_templates.items()}
        self.tool_style = style_of_template(
            bundle.chat_templates.get(TOOL_TEMPLATE) or bundle.chat_templates.get("default") or "")

    def chat(self, request: ChatRequest, *, scope: str = "") -> list[int]:
        """chat_packed() as a list."""
        return self.chat_packed(request, scope=scope).tolist()

    def chat_packed(self, request: ChatRequest, *, scope: str = "", text: str | None = None,
                    replies: Replies | None = None) -> array[int]:
        """The ids of a chat prompt as u32. `scope` names those who may notice that its beginning was seen before.
        `text`: what chat_text() gave for it, if it has been called already. `replies` keep their own spelling.

        ApiError 400: no template, tools that it ignores, what the template refuses, ids out of the vocabulary.
        """
        self._check_logit_bias(request)
        # The template writes the special tokens itself.
        token_ids = self.tokenizer.encode_packed(self.chat_text(request) if text is None else text,
                                                 add_special_tokens=False, scope=scope, replies=replies)
        self._check_ids(token_ids, "messages")
        return token_ids

    def chat_packed_if_known(self, request: ChatRequest, text: str, *, scope: str, max_new_chars: int,
                             replies: Replies | None = None, begins: KnownText | None = None) -> array[int] | None:
        """chat_packed() in next to no time, or None: when more than so many characters of `text` are new. `begins`:
        what known_beginning() gave for some text that this one begins with."""
        token_ids = self.tokenizer.encode_if_known(text, scope=scope, max_new_chars=max_new_chars,
                                                   replies=replies, begins=begins)
        if token_ids is not None:
            self._check_logit_bias(request)
            self._check_ids(token_ids, "messages")
        return token_ids

    def known_beginning(self, request: ChatRequest, *, scope: str) -> KnownText | None:
        """What prompts of chats that go on from these messages mostly begin with; None unless it is remembered."""
        try:
            text = self.chat_text(msgspec.structs.replace(request, add_generation_prompt=False,
                                                          continue_final_message=False))
        except ApiError:
            return None     # these messages alone are no conversation to this template
        return self.tokenizer.known_beginning(text, scope=scope)

    def chat_text(self, request: ChatRequest | TokenizeRequest) -> str:
        """The rendered prompt before tokenising."""
        tools = request.tools if _wants_tools(request) else None
        template = self._template_for(tools)
        return template.render(
            request.messages or (), tools=tools, add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message, template_kwargs=request.chat_template_kwargs)

    def completion(self, request: CompletionRequest, *, scope: str = "") -> list[list[int]]:
        """The ids of each prompt, in order. ApiError 400: an id out of the vocabulary, or a prompt without tokens."""
        self._check_logit_bias(request)
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
        encoded = iter(self.tokenizer.encode_many(texts, add_special_tokens=True, scope=scope))
        prompts = [next(encoded) if isinstance(prompt, str) else list(prompt) for prompt in request.prompts]
        field = "input" if isinstance(request, EmbeddingRequest) else "prompt"
        for index, token_ids in enumerate(prompts):
            self._check_ids(token_ids, field if len(prompts) == 1 else f"{field}[{index}]")
        return prompts

    def tokenize(self, request: TokenizeRequest) -> list[int]:
        """The ids of POST /tokenize, which may be none at all."""
        text = self.chat_text(request) if request.prompt is None else request.prompt
        _check_counted(len(text), "characters", "messages" if request.prompt is None else "prompt")
        return self.tokenizer.encode(text, add_special_tokens=request.add_special_tokens)

    def count(self, request: ChatRequest) -> int:
        """The tokens of a chat prompt that is only counted."""
        text = self.chat_text(request)
        _check_counted(len(text), "characters", "messages")
        return len(self.chat_packed(request, text=text))

    def detokenize(self, request: DetokenizeRequest) -> str:
        """The text of POST /detokenize, special tokens included."""
        _check_counted(len(request.tokens), "ids", "tokens")
        if request.tokens:
            self._check_ids(request.tokens, "tokens")
        return self.tokenizer.decode(request.tokens, skip_special_tokens=False)

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        template = self._templates.get(TOOL_TEMPLATE) if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise invalid_request("This model has no chat template: start its worker with --chat-template FILE, or "
                                  "use /v1/completions.", "messages")
        if tools and not template.uses_tools:
            raise invalid_request("This model's chat template has no place for tools.", "tools")
        return template

    def _check_logit_bias(self, request: ChatRequest | CompletionRequest) -> None:
        highest = max(request.sampling.logit_bias, default=0)
        if highest >= self.tokenizer.vocab_size:
            raise _out_of_vocabulary(highest, self.tokenizer.vocab_size, "logit_bias")

    def _check_ids(self, token_ids: Sequence[int], param: str) -> None:
        # Text can also name a token that the model has no embedding for (Gemma 3's image placeholder).
        if not token_ids:
            raise invalid_request("The prompt has no tokens.", param)
        if isinstance(token_ids, array) and self.tokenizer.text_stays_in_vocabulary:
            return      # an array is what the tokenizer itself gave
        highest = max(token_ids)
        if highest >= self.tokenizer.vocab_size:
            raise _out_of_vocabulary(highest, self.tokenizer.vocab_size, param)


def _wants_tools(request: ChatRequest | TokenizeRequest) -> bool:
    return not isinstance(request, ChatRequest) or request.may_call_tools


def _check_counted(num: int, what: str, param: str) -> None:
    if num > COUNTED_MAX:
        raise invalid_request(f"This is {num} {what} long, and at most {COUNTED_MAX} {what} are read at a time: send "
                              "it in parts.", param)


def _out_of_vocabulary(token_id: int, vocab_size: int, param: str) -> ApiError:
    return invalid_request(f"Token id {token_id} is out of this model's vocabulary of {vocab_size} ids.", param)
