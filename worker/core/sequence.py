"""One generation in the worker: its tokens, where their K/V lie, and the account of who paid for them.

Owns the token list, the block table and the accounts of one sequence. It never takes or returns a block itself: the
scheduler does that with the pool, and only the scheduler writes here once the sequence has been submitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from worker.core.batch import FinishReason
from worker.core.block_content import ContentChain
from worker.protocol.block_hash import ExtraKey, ExtraKeyKind


@dataclass(frozen=True, slots=True)
class StopRule:
    """When a sequence ends. `ignore_eos` takes the model's own end tokens out, never the request's stop tokens.

    The first `min_tokens` outputs can never be ending tokens: they are banned there, and do not end the sequence
    should one come nevertheless.
    """

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """The tokens that end the sequence once `min_tokens` are out."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_token_ids

    def reason(self, num_output_tokens: int, last_token_id: int) -> FinishReason | None:
        """Whether the sequence ends with this token, its `num_output_tokens`-th."""
        if num_output_tokens > self.min_tokens and last_token_id in self.ending_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_output_tokens >= self.max_new_tokens else None


class PromptOutput(Enum):
    """What is wanted of a prompt itself."""

    SCORES = "scores"
    EMBEDDING = "embedding"


class Sequence:
    """A prompt and the tokens generated after it.

    `num_computed_tokens` positions have K/V in the blocks of `block_table`, however they came: prefill, chunk, hit or
    decode. The first `num_sealed_blocks` of the table are sealed: findable, shared and never written again.
    `priority` follows vLLM: the smaller number goes first and is preempted last. `choice` numbers the n choices of
    one request. `resumed_token_ids` are outputs that another worker generated: they are computed like a prompt and
    count as outputs, of which this worker reports only those that follow.
    With a `prompt_output` every position is computed, and no cached block is found or left.
    """

    def __init__(self, seq_id: int, prompt_token_ids: Iterable[int], stop_rule: StopRule, *,
                 extra_keys: Iterable[ExtraKey] = (), priority: int = 0, choice: int = 0,
                 resumed_token_ids: Iterable[int] = (), prompt_output: PromptOutput | None = None) -> None:
        self.seq_id = seq_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.token_ids += resumed_token_ids
        self.num_resumed_tokens = len(self.token_ids) - self.num_prompt_tokens
        self.stop_rule = stop_rule
        self.extra_keys = tuple(extra_keys)
        # What computes its blocks is read from what their hashes say, so that the two cannot differ.
        self.adapter = next((key.value for key in self.extra_keys if key.kind == ExtraKeyKind.LORA), None)
        self.priority = priority
        self.choice = choice
        self.prompt_output = prompt_output
        self.tenant: str | None = None  # set before submission: tenants take turns

        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_sealed_blocks = 0
        self.chain: ContentChain | None = None  # set at submission; None for ever where the pool does not cache

        self.num_cached_tokens: int | None = None  # None until first admitted; then 0 <= cached <= prompt - 1
        self.num_computed_positions = 0  # all work done for it: a position counts each time it is computed
        self.num_recomputed_tokens = 0  # of these, positions computed again after a preemption
        self.num_preemptions = 0
        self.num_lost_tokens = 0  # positions computed before a preemption that may have to be computed again
        self.num_uncached_tokens = self.num_tokens  # while it waits: prefill work it stands for, as last seen

    @property
    def scores_prompt(self) -> bool:
        """Whether the logits of every prompt position are wanted."""
        return self.prompt_output is PromptOutput.SCORES

    @property
    def pools(self) -> bool:
        """Whether every prompt position's hidden state is wanted."""
        return self.prompt_output is PromptOutput.EMBEDDING

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens_max(self) -> int:
        """The longest it can become."""
        return self.num_prompt_tokens + self.stop_rule.max_new_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Positions to compute before the next token can be sampled."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt."""
        return self.token_ids[:self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of what was generated."""
        return self.token_ids[self.num_prompt_tokens:]

    @property
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens the sampler must not choose next: the ending ones, until `min_tokens` are out."""
        banning = self.num_output_tokens < self.stop_rule.min_tokens
        return self.stop_rule.ending_token_ids if banning else frozenset()

    def append(self, token_id: int) -> None:
        """One more output token; its K/V come with the next step."""
        self.token_ids.append(token_id)
        if self.chain is not None:
            self.chain.append((token_id,))

    def take_matched(self, block_ids: Iterable[int], block_size: int) -> None:
        """Begin behind cached blocks. A full hit holds them all and computes its last position again, for logits."""
        assert not self.block_table, "a sequence begins without blocks"
        self.block_table = list(block_ids)
        self.num_sealed_blocks = len(self.block_table)
        self.num_computed_tokens = min(self.num_sealed_blocks * block_size, self.num_tokens - 1)

    def adopt(self, block_ids: list[int], block_size: int) -> list[int]:
        """Go on behind sealed blocks that another computed meanwhile. The blocks of its own that they replace."""
        start, before = self.num_sealed_blocks, self.num_computed_tokens
        replaced = self.block_table[start:start + len(block_ids)]
        self.block_table[start:start + len(block_ids)] = block_ids
        self.num_sealed_blocks += len(block_ids)
        end = min(self.num_sealed_blocks * block_size, self.num_tokens - 1)
        self.num_computed_tokens = max(before, end)
        return replaced

    def advance(self, num_positions: int) -> int:
        """`num_positions` more have K/V now. How many of these had been computed before a preemption."""
        start = self.num_computed_tokens
        self.num_computed_tokens += num_positions
        num_again = max(0, min(self.num_computed_tokens, self.num_lost_tokens) - start)
        if self.num_computed_tokens >= self.num_lost_tokens:
            self.num_lost_tokens = 0
        self.num_computed_positions += num_positions
        self.num_recomputed_tokens += num_again
        return num_again

    def preempt(self) -> None:
        """The blocks go, and with them the positions they held: computing those again counts as recomputed."""
        self.num_preemptions += 1
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.drop_blocks()

    def drop_blocks(self) -> None:
        """The blocks are the pool's again."""
        self.block_table = []
        self.num_computed_tokens = 0
        self.num_sealed_blocks = 0
