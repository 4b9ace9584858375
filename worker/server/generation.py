"""One request being answered: the engine's tokens in, each choice's text out.

Owns a request's choices while the engine works on them: detokenising, stop strings (found here, then the engine is
told to stop that choice), what the client is billed, and the queue of deltas between the engine's reports and the
handler that writes them. Knows neither HTTP nor the shape of OpenAI objects.

Two ends are told apart: a choice is *answered* when its client will get no more text, and *released* when the engine
has reported its end with the account (stats). A stop string or a client that leaves puts the first before the second.

The delta queue needs no limit of its own: it holds at most the tokens the request was admitted with (its
max_new_tokens, capped by the context).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from worker.core.batch import ScoredToken, TokenLogprobs
from worker.engine.messages import SequenceOutput, SequenceStats
from worker.prompt.detokenizer import StreamDetokenizer
from worker.prompt.tool_parser import Parsed, ToolCall, ToolCallParser
from worker.protocol.api_error import ApiError, invalid_request
from worker.protocol.internal_request import RESUME_HEADER

AbortChoice = Callable[[int | None], None]


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one choice gained: text that can no longer change, the tokens that came, their log-probabilities.

    Text may lag behind the tokens (half a character, a possible stop string or tool call). `tool_calls` come after
    the text. `finish_reason` is "stop", "tool_calls", "length" or "abort" on the last delta of a choice, and
    `stop_string` what ended it there.
    """

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None


@dataclass(slots=True)
class _Choice:
    detokenizer: StreamDetokenizer
    tool_parser: ToolCallParser | None
    num_tokens: int = 0
    unsent: str = ""    # text that goes before the next delta's: an echoed prompt, or from before a resumption
    cached_tokens: int | None = None
    prompt_scores: list[ScoredToken] | None = None
    embedding: list[float] | None = None
    finish_reason: str | None = None
    stats: SequenceStats | None = None
    released: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """What a request used. `cached_tokens` counts each prompt once: the hit of its first choice that computed it."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Generation:
    """`key` names it to the engine (unique while it lives), `request_id` to the client and the logs.

    Choice index = prompt index * n + number of the choice, as OpenAI numbers them. `first_choice`: the only one of
    a resumed request.
    """

    key: str
    request_id: str
    route: str
    model: str
    prompt_lengths: list[int]
    num_choices_per_prompt: int
    tokenize_s: float
    detokenizers: Sequence[StreamDetokenizer]
    abort: AbortChoice
    tool_parsers: Sequence[ToolCallParser | None] = ()
    first_choice: int = 0
    arrived_at: float = field(default_factory=time.monotonic)
    abandoned: bool = False
    _choices: list[_Choice] = field(init=False)
    _deltas: list[ChoiceDelta] = field(default_factory=list, init=False)
    _news: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _error: ApiError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        parsers = self.tool_parsers or [None] * len(self.detokenizers)
        self._choices = [_Choice(detokenizer, parser)
                         for detokenizer, parser in zip(self.detokenizers, parsers, strict=True)]

    def echo(self, prompt_texts: Sequence[str]) -> None:
        """Each choice's text begins with its prompt's."""
        for index, choice in enumerate(self._choices):
            choice.unsent = prompt_texts[index // self.num_choices_per_prompt]

    def replay(self, token_ids: Sequence[int], *, sent_chars: int) -> None:
        """Begin behind what another worker generated of the only choice, and `sent_chars` of its text on.

        Everything goes the way it went there, stops and tool calls included, but nothing is handed out again.
        ApiError 400 when the text that was sent cannot have come from these tokens.
        """
        [choice] = self._choices
        pushed = choice.detokenizer.push(token_ids)
        text = choice.unsent + _parse(choice.tool_parser, pushed.text, is_last=False).text
        if pushed.stopped or sent_chars > len(text):
            raise invalid_request(f"{RESUME_HEADER}: the generated ids make {len(text)} characters"
                                  f"{' and then stop' if pushed.stopped else ''}, of which {sent_chars} cannot have "
                                  "been sent.", RESUME_HEADER)
        choice.num_tokens, choice.unsent = len(token_ids), text[sent_chars:]

    # -- from the engine ----------------------------------------------------------------------------------------

    def deliver(self, output: SequenceOutput) -> None:
        """Take what one choice produced in a step."""
        choice = self._choices[output.choice - self.first_choice]
        if output.cached_tokens is not None:
            choice.cached_tokens, choice.prompt_scores = output.cached_tokens, output.prompt_scores
            choice.embedding = output.embedding
        if output.finish_reason is not None:
            choice.released, choice.stats = True, output.stats
        if output.finish_reason == "error":
            self.fail(_error(output))
        elif choice.finish_reason is None and not self.abandoned:
            self._advance(choice, output)

    def fail(self, error: ApiError) -> None:
        """End the request for its client. What was produced before is still handed out first."""
        if self._error is None:
            self._error = error
            self.abort(None)
            self._news.set()

    def abandon(self) -> None:
        """The handler is done, with or without its client: stop whatever still runs. Harmless when nothing does."""
        self.abandoned = not self.answered
        self._deltas.clear()
        if not self.released:
            self.abort(None)

    # -- to the handler -----------------------------------------------------------------------------------------

    async def next_deltas(self) -> list[ChoiceDelta]:
        """All that came since the last call, waiting for something; empty once every choice is answered.

        Raises the ApiError that ended the request.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.answered:
                return []
            self._news.clear()
            await self._news.wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def answered(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    @property
    def released(self) -> bool:
        """The engine holds nothing of this request any more."""
        return all(choice.released for choice in self._choices)

    @property
    def finish_reasons(self) -> list[str]:
        """One per choice, for the log: what the client was told, or why it was told nothing."""
        fallback = "error" if self._error is not None else "abort"
        return [choice.finish_reason or fallback for choice in self._choices]

    @property
    def stats(self) -> list[SequenceStats]:
        """The engine's accounts, of the choices that have one."""
        return [choice.stats for choice in self._choices if choice.stats is not None]

    def account(self) -> Account:
        """What to report as usage. Before the first token of a prompt its cached tokens count as 0."""
        cached = sum(self._cached_of_prompt(index) for index in range(len(self.prompt_lengths)))
        return Account(sum(self.prompt_lengths), cached, sum(choice.num_tokens for choice in self._choices))

    def embeddings(self) -> list[list[float]]:
        """Of each prompt, once all are answered."""
        return [choice.embedding or [] for choice in self._choices]

    def prompt_scores(self, choice: int) -> list[ScoredToken]:
        """What the model thought of the choice's prompt, its first token apart. Its first choice knows."""
        first = choice - choice % self.num_choices_per_prompt
        return self._choices[first].prompt_scores or []

    # -- inside -------------------------------------------------------------------------------------------------

    def _cached_of_prompt(self, index: int) -> int:
        """The smallest hit among a prompt's choices: the others may have hit what the first of them computed."""
        first = index * self.num_choices_per_prompt
        known = [choice.cached_tokens for choice in self._choices[first:first + self.num_choices_per_prompt]
                 if choice.cached_tokens is not None]
        return min(known, default=0)

    def _advance(self, choice: _Choice, output: SequenceOutput) -> None:
        # The token that ended the sequence (EOS, a stop token) is counted and reported, but is no text.
        ends_with_stop_token = output.finish_reason == "stop"
        text_ids = output.token_ids[:-1] if ends_with_stop_token else output.token_ids
        pushed = choice.detokenizer.push(text_ids)
        if pushed.stopped:
            self._append(choice, output, text=pushed.text, num_tokens=pushed.num_tokens_used, reason="stop")
            if not choice.released:
                self.abort(output.choice)
            return
        text = pushed.text
        if output.finish_reason is not None:
            text += choice.detokenizer.finish()
        self._append(choice, output, text=text, num_tokens=len(output.token_ids), reason=output.finish_reason)

    def _append(self, choice: _Choice, output: SequenceOutput, *, text: str, num_tokens: int,
                reason: str | None) -> None:
        choice.num_tokens += num_tokens
        parsed = _parse(choice.tool_parser, text, is_last=reason is not None)
        if reason == "stop" and choice.tool_parser is not None and choice.tool_parser.has_calls:
            reason = "tool_calls"
        choice.finish_reason = reason
        logprobs = None if output.logprobs is None else output.logprobs[:num_tokens]
        text, choice.unsent = choice.unsent + parsed.text, ""
        self._deltas.append(ChoiceDelta(output.choice, text, output.token_ids[:num_tokens], logprobs, reason,
                                        parsed.calls, choice.detokenizer.stop_string if reason == "stop" else None))
        self._news.set()


def _parse(parser: ToolCallParser | None, text: str, *, is_last: bool) -> Parsed:
    """The text and the calls in it; on a choice's last text, all that was held back too."""
    if parser is None:
        return Parsed(text)
    parsed = parser.push(text)
    return Parsed(parsed.text + parser.finish(), parsed.calls) if is_last else parsed


def _error(output: SequenceOutput) -> ApiError:
    message = output.error or "The engine could not finish this request."
    if output.error_param is not None:
        return invalid_request(message, output.error_param)
    return ApiError(500, "worker_failed", message)
