"""Grammars: from a GrammarSpec to a matcher that says which tokens may come next. The one importer of llguidance.

Owns compiled grammars and each choice's state in its own. Knows nothing of sequences or tensors: a mask is bytes.
Compiling is bounded by fuel, not time, so that the same schema is taken or refused on every machine. A thread of its
own compiles (`prepare`), so that no step and no request without a grammar waits for it; whoever asks first pays.
The vocabulary is read at start. Known approximation: grammars are compiled one after the other.
"""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from worker.prompt.grammar_spec import GrammarKind, GrammarSpec
from worker.prompt.tool_grammar import WHITESPACE_PATTERN

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILED_MAX = 64
"""Compiled grammars kept, the least recently used forgotten first; refused ones count too."""
MESSAGE_CHARS_MAX = 300
COMPILE_FUEL = 1_000_000
STEP_FUEL = 200_000
STEP_ITEMS_MAX = 50_000
LEXER_STATES_MAX = 250_000
GRAMMAR_SIZE_MAX = 500_000
ROW_ITEMS_MAX = 2_000
_INSIDES = re.compile(r"<(?:state|backtrace)>")
_MEANT = {"NoExtensionBias": "no text can match it"}
logger = logging.getLogger("headstart.engine")


class GrammarError(Exception):
    """The grammar cannot be followed: one line for the client."""


class Matcher:
    """One choice's way through a grammar. `allowed` has one bit per token id, the lowest bit of a byte first.

    `error` says why there is no way on (a limit was hit); None while there is.
    """

    def __init__(self, inner: LLMatcher) -> None:
        self._inner = inner
        self.error: str | None = None
        self.allowed = b""
        self._look()

    def advance(self, token_ids: Sequence[int]) -> None:
        """The tokens that were chosen, in order."""
        if self.error is None:
            self._inner.consume_tokens(list(token_ids))
            self._look()

    def copy(self) -> Matcher:
        """A matcher at the same place, for another choice."""
        return Matcher(self._inner.deep_copy())

    def _look(self) -> None:
        self.allowed = self._inner.compute_bitmask()
        if self._inner.is_error():
            self.error = _one_line(self._inner.get_error())


class GrammarCompiler:
    """One model's grammars. Safe to use from the reading thread and the stepping one."""

    def __init__(self, tokenizer_json: bytes, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[GrammarSpec, Matcher | GrammarError] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()

    def warm_up(self) -> threading.Thread:
        """Read the vocabulary in a thread of its own, so that no request has to wait for it."""
        thread = threading.Thread(target=self._warm_up, name="grammar-vocabulary", daemon=True)
        thread.start()
        return thread

    def _warm_up(self) -> None:
        try:
            self._llguidance_tokenizer()
        except Exception as error:      # the first grammar will say so to whoever sends it
            logger.warning("grammars cannot be followed here: %r", error)

    def prepare(self, spec: GrammarSpec) -> None:
        """Compile, so that matcher() is quick. Never raises: what is wrong with the grammar is kept for matcher()."""
        self._compiled_form(spec)

    def matcher(self, spec: GrammarSpec) -> Matcher:
        """A matcher at the grammar's beginning. Raises GrammarError."""
        compiled = self._compiled_form(spec)
        if isinstance(compiled, GrammarError):
            raise compiled
        return compiled.copy()

    def _compiled_form(self, spec: GrammarSpec) -> Matcher | GrammarError:
        with self._lock:
            known = self._compiled.pop(spec, None)
            if known is not None:
                self._compiled[spec] = known
                return known
        compiled = self._compile(spec)    # outside the lock: the stepping thread may want another one meanwhile
        with self._lock:
            self._compiled[spec] = compiled
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, spec: GrammarSpec) -> Matcher | GrammarError:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=COMPILE_FUEL, step_lexer_fuel=STEP_FUEL, step_max_items=STEP_ITEMS_MAX,
            max_lexer_states=LEXER_STATES_MAX, max_grammar_size=GRAMMAR_SIZE_MAX, max_items_in_row=ROW_ITEMS_MAX)
        try:
            grammar = _SOURCES[spec.kind](spec.text)
        except ValueError as error:
            return GrammarError(_one_line(str(error)))
        matcher = Matcher(LLMatcher(self._llguidance_tokenizer(), grammar, log_level=0, limits=limits))
        return matcher if matcher.error is None else GrammarError(matcher.error)

    def _llguidance_tokenizer(self) -> LLTokenizer:
        """Made once, which takes seconds for the largest vocabularies; who comes meanwhile waits for it."""
        with self._making:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            return self._tokenizer

    def _make_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer
        from tokenizers import Tokenizer

        source = Tokenizer.from_buffer(self._tokenizer_json)
        source.no_padding()
        source.no_truncation()
        highest = max([source.get_vocab_size(with_added_tokens=True) - 1, *source.get_added_tokens_decoder()])
        return LLTokenizer(source.to_str(), n_vocab=max(highest + 1, self._vocab_size),
                           eos_token=self._eos_token_ids)


def _from_schema(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE_PATTERN})


def _from_lark(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_lark(text)


_SOURCES: dict[GrammarKind, Callable[[str], str]] = {
    GrammarKind.JSON_SCHEMA: _from_schema, GrammarKind.LARK: _from_lark}


def _one_line(message: str) -> str:
    """What is wrong, without the compiler's own state behind it."""
    reason = " ".join(_INSIDES.split(message, maxsplit=1)[0].split())
    return _MEANT.get(reason, reason)[:MESSAGE_CHARS_MAX]
