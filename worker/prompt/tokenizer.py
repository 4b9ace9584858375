"""Text to token ids and back, and the bundle that carries a tokenizer from worker to gateway.

Owns which ids a text has for a model. Must never trim, pad or add anything but what tokenizer.json says, and never
load anything from a hub. Decoding is exactly the tokenizer's own: no clean-up of spaces before punctuation.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path

import msgspec
import orjson
from tokenizers import Tokenizer

from worker.prompt import tokenizer_folder
from worker.prompt.cut_rules import HARD_TEXTS, TokenizerRules, boundary_tokens, cut_rule, cuts_hold, read_rules
from worker.prompt.fast_bpe import FastBpe, fast_bpe
from worker.prompt.prefix_encoder import PIECE_CHARS, PrefixEncoder
from worker.prompt.reply_stretches import StretchKey, reply_stretches
from worker.prompt.segment_encoder import KnownText, Replies, SegmentEncoder
from worker.prompt.token_bytes import DecoderShape, bytes_of_token, decoder_shape

WIRE_VERSION = 1
TEXT_MEMORY_BYTES = 64 << 20  # in all: some 20 million characters of text with their ids
_AROUND_PROBES = ("", "a", "the 7th\nb")
_BOUNDARIES_CHECKED = 16


class TokenizerBundle(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything a gateway needs to render and tokenise for a model, with no hub and no files.

    `chat_templates` maps "default" and other names ("tool_use") to Jinja source; empty when the model has none.
    `special_tokens` holds the named tokens only ("bos_token": "<s>"), as templates read them. `model_vocab_size` is
    the number of the model's embedding rows, None when unknown: ids from there on cannot be computed.
    """

    tokenizer_json: bytes
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    eos_token_ids: tuple[int, ...]
    model_vocab_size: int | None = None

    @classmethod
    def from_directory(cls, path: Path, chat_template: Path | None = None) -> TokenizerBundle:
        """Read a Hugging Face model folder; `chat_template` (a Jinja file) replaces the folder's own templates.

        Raises TokenizerError (a ValueError) naming the file and the remedy.
        """
        config = tokenizer_folder.read_config(path)
        tokenizer_json = tokenizer_folder.read_tokenizer(path, config)
        special_tokens = tokenizer_folder.named_special_tokens(config)
        templates = tokenizer_folder.read_chat_templates(path, config, chat_template)
        added = tokenizer_folder.added_tokens(tokenizer_json)
        eos_token_ids = tokenizer_folder.stated_eos_token_ids(path, special_tokens, added)
        if "default" in templates:
            eos_token_ids |= tokenizer_folder.turn_end_token_ids(templates["default"], special_tokens, added)
        return cls(tokenizer_json=tokenizer_json, special_tokens=special_tokens, chat_templates=templates,
                   eos_token_ids=tuple(sorted(eos_token_ids)),
                   model_vocab_size=tokenizer_folder.read_model_vocab_size(path))

    @property
    def chat_template(self) -> str | None:
        return self.chat_templates.get("default")

    @cached_property
    def tokenizer_digest(self) -> str:
        """Hex SHA-256 of what decides token ids."""
        return _digest([self.tokenizer_json])

    @cached_property
    def template_digest(self) -> str:
        """Hex SHA-256 of what decides rendered text."""
        return _digest([orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
                        for value in (self.chat_templates, self.special_tokens)])

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over the whole bundle: the ETag of GET /tokenizer."""
        rest = orjson.dumps([self.eos_token_ids, self.model_vocab_size])
        return _digest([self.tokenizer_digest.encode(), self.template_digest.encode(), rest])

    def to_wire(self) -> bytes:
        """The body of GET /tokenizer: a JSON object with the fields of this class and both digests."""
        return orjson.dumps({
            "version": WIRE_VERSION, "tokenizer_json": self.tokenizer_json.decode(),
            "special_tokens": self.special_tokens, "chat_templates": self.chat_templates,
            "eos_token_ids": self.eos_token_ids, "model_vocab_size": self.model_vocab_size,
            "tokenizer_digest": self.tokenizer_digest, "template_digest": self.template_digest,
        })

    @classmethod
    def from_wire(cls, body: bytes) -> TokenizerBundle:
        """The inverse of to_wire(); ValueError on anything else, and when the digests do not fit the content."""
        try:
            wire = _wire_decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ValueError(f"not a tokenizer bundle: {error}") from error
        if wire.version != WIRE_VERSION:
            raise ValueError(f"tokenizer bundle of version {wire.version}, where {WIRE_VERSION} is read: run the "
                             "same release on both sides")
        bundle = cls(tokenizer_json=wire.tokenizer_json.encode(), special_tokens=wire.special_tokens,
                     chat_templates=wire.chat_templates, eos_token_ids=wire.eos_token_ids,
                     model_vocab_size=wire.model_vocab_size)
        if (bundle.tokenizer_digest, bundle.template_digest) != (wire.tokenizer_digest, wire.template_digest):
            raise ValueError("tokenizer bundle whose digests do not fit its content")
        return bundle


class _WireBundle(msgspec.Struct):
    version: int
    tokenizer_json: str
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    eos_token_ids: tuple[int, ...]
    model_vocab_size: int | None
    tokenizer_digest: str
    template_digest: str


_wire_decoder = msgspec.json.Decoder(_WireBundle)


class PromptTokenizer:
    """A loaded tokenizer, safe to use from several threads.

    `vocab_size` is one above the highest id that may be computed: tokens that the model has no embedding for are cut
    off, and unless `text_stays_in_vocabulary` a text may name one of them. What was encoded is remembered, within
    bounds, for texts that begin alike; only the memory is locked, while it is read or added to. Raises ValueError
    when tokenizer.json cannot be loaded.
    """

    def __init__(self, bundle: TokenizerBundle, *, memory_bytes: int = TEXT_MEMORY_BYTES) -> None:
        self.bundle = bundle
        self._memory_bytes = memory_bytes // 2  # of long texts' pieces, and as much of stretches
        try:
            self._tokenizer = Tokenizer.from_buffer(bundle.tokenizer_json)
        except Exception as error:  # tokenizers raises bare Exception
            raise tokenizer_folder.TokenizerError(f"tokenizer.json cannot be loaded: {error}") from error
        # A saved file may carry its training run's padding and truncation; a prompt is taken whole.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        num_tokens = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        highest = max([num_tokens - 1, *added])
        self.vocab_size = min(highest + 1, bundle.model_vocab_size or highest + 1)
        self.text_stays_in_vocabulary = self.vocab_size == highest + 1
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.decoder_shape = self._read_decoder_shape()
        self._token_bytes: dict[int, bytes] = {}  # at most one entry per vocabulary entry
        self._around: tuple[array[int], array[int]] | None = None
        self._fast_bpe: FastBpe | None = None
        self._prefix_encoder: PrefixEncoder | None = None
        self._segments: SegmentEncoder | None = None
        try:
            self._find_shortcuts()
        except Exception:  # tokenizers raises bare Exception, here for a vocabulary that cannot take every text
            self._around = self._fast_bpe = self._prefix_encoder = self._segments = None

    def encode(self, text: str, *, add_special_tokens: bool, scope: str = "") -> list[int]:
        """The ids of a text."""
        return self.encode_packed(text, add_special_tokens=add_special_tokens, scope=scope).tolist()

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool, scope: str = "") -> list[list[int]]:
        """The ids of each text, in parallel over the texts."""
        return [token_ids.tolist() for token_ids in self._encode_packed(texts, add_special_tokens, scope)]

    def encode_packed(self, text: str, *, add_special_tokens: bool, scope: str = "",
                      replies: Replies | None = None) -> array[int]:
        """The ids of a text as u32 without an object each. `scope` names who may notice what was seen before;
        `replies` has stretches that are to keep the spelling of a model's reply."""
        if self._segments is not None and not add_special_tokens:
            return self._segments.encode(text, scope, replies)
        return self._encode_packed([text], add_special_tokens, scope)[0]

    def encode_if_known(self, text: str, *, scope: str, max_new_chars: int, replies: Replies | None = None,
                        begins: KnownText | None = None) -> array[int] | None:
        """encode_packed() without special tokens around the text, if it takes next to no time: when all but so many
        characters are remembered. Else None. `begins`: a known_beginning() of the text."""
        segments = self._segments
        return None if segments is None else segments.encode_if_known(
            text, scope, max_new_chars, replies, begins=begins)

    def known_beginning(self, text: str, *, scope: str) -> KnownText | None:
        """See SegmentEncoder.beginning()."""
        return None if self._segments is None else self._segments.beginning(text, scope)

    def reply_stretches(self, prompt: Sequence[int], reply: Sequence[int]) -> list[tuple[StretchKey, array[int]]]:
        """How a later prompt that repeats this reply is recognised; see reply_stretches.py. Empty for a tokenizer
        whose texts cannot be cut at added tokens."""
        if self._segments is None:
            return []
        boundaries = self._segments.contents
        # A special token that no template writes ends the text that can come back: an end of text.
        end = next((at for at, token_id in enumerate(reply)
                    if token_id in self.special_token_ids and token_id not in boundaries), len(reply))
        return reply_stretches(prompt, reply[:end], boundaries=boundaries,
                               decode=partial(self.decode, skip_special_tokens=False))

    def _encode_packed(self, texts: Sequence[str], add_special_tokens: bool, scope: str) -> list[array[int]]:
        segments, prefixes, around = self._segments, self._prefix_encoder, self._around
        if add_special_tokens and around is None:
            return self._encode_whole(texts, add_special_tokens)
        if segments is not None:
            plain = segments.encode_many(texts, scope)
        elif prefixes is not None and max(map(len, texts), default=0) >= PIECE_CHARS:
            plain = prefixes.encode_many(texts, scope)
        else:
            return self._encode_whole(texts, add_special_tokens)
        if not add_special_tokens or around is None:
            return plain
        before, behind = around
        return [before + token_ids + behind for token_ids in plain]

    def _encode_whole(self, texts: Sequence[str], add_special_tokens: bool) -> list[array[int]]:
        # The batch call is used because it alone releases the GIL while it works.
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [array("I", encoding.ids) for encoding in encodings]

    def _encode_parts(self, texts: Sequence[str], *, has_added: bool = True) -> list[array[int]]:
        """The ids of each text without special tokens around them, by the fastest means that is sure of them."""
        fast = self._fast_bpe
        if fast is None:
            return self._encode_whole(texts, False)
        found = [fast.encode(text, has_added=has_added) for text in texts]
        unsure = [index for index, token_ids in enumerate(found) if token_ids is None]
        if unsure:
            encoded = dict(zip(unsure, self._encode_whole([texts[index] for index in unsure], False), strict=True))
            found = [encoded[index] if token_ids is None else token_ids for index, token_ids in enumerate(found)]
        return [token_ids for token_ids in found if token_ids is not None]

    def _find_shortcuts(self) -> None:
        rules = read_rules(self.bundle.tokenizer_json)
        self._around = self._read_around()
        self._fast_bpe = fast_bpe(rules, self._tokenizer) if rules is not None else None
        self._prefix_encoder = self._make_prefix_encoder(rules)
        self._segments = self._make_segment_encoder(rules)

    def _make_prefix_encoder(self, rules: TokenizerRules | None) -> PrefixEncoder | None:
        rule = cut_rule(rules) if rules is not None else None
        if rule is None or not cuts_hold(rule, self._encode_parts):
            return None
        return PrefixEncoder(rule, self._encode_parts, self._memory_bytes)

    def _make_segment_encoder(self, rules: TokenizerRules | None) -> SegmentEncoder | None:
        boundaries = {} if rules is None else self._boundaries(boundary_tokens(rules))
        if rules is None or not boundaries:
            return None
        encoder = SegmentEncoder(boundaries, partial(self._encode_parts,
                                                     has_added=len(boundaries) < len(rules.added_tokens)),
                                 prefixes=self._prefix_encoder, max_bytes=self._memory_bytes)
        # A check on the reasoning: boundaries at both ends of hard texts and in their middle.
        some = sorted(boundaries)[:_BOUNDARIES_CHECKED]
        texts = [f"{token}{text}{token}{text[len(text) // 2:]}" for token in some for text in HARD_TEXTS]
        holds = encoder.encode_many(texts) == self._encode_whole(texts, False)
        encoder.memory.clear()
        return encoder if holds else None

    def _boundaries(self, possible: dict[str, int]) -> dict[str, int]:
        """Those that the templates write, since they are what parts turns; a few others where there are none."""
        sources = "".join(self.bundle.chat_templates.values()) + " ".join(self.bundle.special_tokens.values())
        written = {content: token_id for content, token_id in possible.items() if content in sources}
        return written or dict(list(possible.items())[:_BOUNDARIES_CHECKED])

    def _read_around(self) -> tuple[array[int], array[int]] | None:
        """The ids that special tokens put before and behind every text; None when that is not all they do."""
        plain = self._encode_whole(_AROUND_PROBES, False)
        full = self._encode_whole(_AROUND_PROBES, True)
        empty = full[0]
        for length in range(len(empty) + 1):
            before, behind = empty[:length], empty[length:]
            if all(before + inner + behind == outer for inner, outer in zip(plain, full, strict=True)):
                return before, behind
        return None

    @property
    def remembered_bytes(self) -> int:
        """What the memories of earlier texts hold: `memory_bytes` at most."""
        return ((0 if self._prefix_encoder is None else self._prefix_encoder.trie.num_bytes)
                + (0 if self._segments is None else self._segments.memory.num_bytes))

    @property
    def segment_finds(self) -> tuple[int, int]:
        """Stretches of text found in memory, and not found, so far."""
        memory = None if self._segments is None else self._segments.memory
        return (0, 0) if memory is None else (memory.num_found, memory.num_missed)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of all ids together; ids that the tokenizer does not know add nothing."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def special_token_id(self, text: str) -> int | None:
        """The id of a special token, which no text can spell; None when the text is no such token."""
        token_id: int | None = self._tokenizer.token_to_id(text)
        return token_id if token_id in self.special_token_ids else None

    def token_text(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it ("Ġthe", "▁the", "<0xE2>"); None when there is no such token."""
        text: str | None = self._tokenizer.id_to_token(token_id)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds inside a text (the `bytes` of OpenAI's logprobs); b"" for an unknown id."""
        known = self._token_bytes.get(token_id)
        if known is None:
            token = self.token_text(token_id)
            if token is None:
                return b""
            known = self._token_bytes[token_id] = bytes_of_token(token, self.decoder_shape)
        return known

    def _read_decoder_shape(self) -> DecoderShape:
        decoder = self._tokenizer.decoder
        return decoder_shape({} if decoder is None else orjson.loads(decoder.__getstate__()))


def _digest(parts: Sequence[bytes]) -> str:
    """SHA-256 over length-prefixed parts, so that no two splits of the same bytes are equal."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()
