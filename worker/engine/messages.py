"""What the HTTP shell and the engine process say to each other over their pipe. Plain picklable values, no torch.

Shell to engine: SubmitSequence, AbortRequest, ResetCache, Shutdown; drained at the top of each step.
Engine to shell: EngineReady or EngineFailed once, then one StepReport per step that has something to tell, and
between them an EngineBeat every second.
All instants are time.monotonic() seconds, which both processes of one machine share.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from worker.core.batch import ScoredToken, TokenLogprobs
from worker.prompt.grammar_spec import GrammarSpec
from worker.prompt.sampling_params import SamplingParams
from worker.protocol.block_hash import ExtraKey, HashScheme
from worker.protocol.cache_events import CacheEvent


@dataclass(frozen=True, slots=True)
class SubmitSequence:
    """One choice of one request. `token_ids` is the whole prompt; `max_new_tokens` is capped to the context.

    The last `num_generated` of `token_ids` are no prompt but outputs of another worker, to be gone on from; they
    count towards `max_new_tokens`, and are not reported again.
    `stop_token_ids` end it besides the model's own EOS tokens, which the engine knows and `params.ignore_eos` drops.
    A `grammar` decides when the answer may end: `ignore_eos` and `min_tokens` yield to it.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    params: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    extra_keys: tuple[ExtraKey, ...] = ()
    priority: int = 0
    tenant: str | None = None
    arrived_at: float = 0.0
    grammar: GrammarSpec | None = None
    num_generated: int = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[:len(self.token_ids) - self.num_generated]

    @property
    def generated_token_ids(self) -> list[int]:
        return self.token_ids[len(self.token_ids) - self.num_generated:]


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """Stop every choice of this request (or one, when `choice` is given); its blocks are free by the step's end."""

    request_id: str
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Forget every cached block that no running sequence holds; answered by an AllBlocksCleared event."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Abort everything and exit 0."""


Command = SubmitSequence | AbortRequest | ResetCache | Shutdown


@dataclass(frozen=True, slots=True)
class EngineReady:
    """The model is loaded and warmed up. `folder` holds tokenizer.json and template files for the shell.

    `token_budget` is how many prompt positions a step computes beside decoding, at the beginning of a prompt.
    `activation_bytes` is what a whole step was seen to need beside weights and KV, `other_bytes` what the process
    holds besides, `read_bytes_per_s` how fast the device's memory was read.
    `adapters`: name and content digest of each. `weight_dtype`: what the weights were rounded to. `cpu_threads` is
    how many it computes with, 0 on a device of its own.
    """

    folder: str
    model: str
    hash_scheme: HashScheme
    num_blocks: int
    block_size: int
    max_context: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    device: str
    dtype: str
    kv_dtype: str
    kv_bytes_per_token: int
    exactness: str
    prefill_tokens_per_s: float
    decode_step_s: float
    notes: tuple[str, ...] = ()
    token_budget: int = 0
    weights_bytes: int = 0
    activation_bytes: int = 0
    other_bytes: int = 0
    read_bytes_per_s: float = 0.0
    adapters: tuple[tuple[str, bytes], ...] = ()
    weight_dtype: str = ""
    cpu_threads: int = 0


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """One line: what is wrong and what to do. `users_fault`: a wrong path or setting (exit 2), else a bug (1)."""

    message: str
    users_fault: bool


@dataclass(frozen=True, slots=True)
class SequenceStats:
    """A finished sequence's account. Prompt positions only: cached + computed = prompt, less where it was aborted
    early; `recomputed_tokens`, after preemptions, counts apart.

    `phases` are the seconds of TTFT by phase: queue, allocate, prefill, recompute, sample.
    """

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    output_tokens: int
    preemptions: int
    phases: dict[str, float]
    inter_token_p50_s: float | None
    inter_token_max_s: float | None


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """What one sequence produced in a step.

    `cached_tokens` is set on its first output and None afterwards. `finish_reason`: "stop" (EOS or a stop token,
    which is the last of `token_ids`), "length", "abort", "error" (`error` says why, `error_param` which field of the
    request is to blame, if one is); None while it runs. `prompt_scores`, with the first output where they were asked
    for: of every prompt token but the first. `embedding`, likewise: the mean of the prompt's last hidden states.
    """

    request_id: str
    choice: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    stats: SequenceStats | None = None
    error: str | None = None
    error_param: str | None = None
    prompt_scores: list[ScoredToken] | None = None
    embedding: list[float] | None = None


@dataclass(frozen=True, slots=True)
class PreemptionNote:
    """For the log line: who needed room, whose blocks went, and the tokens to compute again."""

    request_id: str
    for_request_id: str
    num_blocks: int
    recompute_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Cumulative counters and present state, as of the end of a step.

    `blocks_claimed` of the used ones are held for waiting sequences. `token_budget` as in EngineReady, as corrected
    since. `memory_bandwidth_ratio` is what the last decode steps had to read, over what the device could have read.
    """

    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_used: int = 0
    num_running: int = 0
    num_waiting: int = 0
    waiting_prefill_tokens: int = 0
    running_prefill_tokens: int = 0
    decode_context_tokens: int = 0
    computed_positions_total: int = 0
    queried_tokens_total: int = 0
    hit_tokens_total: int = 0
    evictions_total: int = 0
    preemptions_total: int = 0
    recomputed_preempted_total: int = 0
    recomputed_evicted_total: int = 0
    steps_total: int = 0
    shrunk_steps_total: int = 0
    blocks_claimed: int = 0
    waste_tail_slots: int = 0
    waste_reserved_slots: int = 0
    waste_duplicate_slots: int = 0
    token_budget: int = 0
    memory_bandwidth_ratio: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """One exchange per step: outputs, the cache events in order, notes for the log, and the state after it.

    `overhead_s` is what passed since the last step's tokens without the model at work: commit, report, commands,
    scheduling; after an idle moment, scheduling alone.
    """

    outputs: list[SequenceOutput] = field(default_factory=list)
    events: list[CacheEvent] = field(default_factory=list)
    preemptions: list[PreemptionNote] = field(default_factory=list)
    evicted_blocks: int = 0
    evicted_for: str | None = None
    stats: EngineStats = field(default_factory=EngineStats)
    step_s: float = 0.0
    overhead_s: float = 0.0
    step_kind: str = "idle"
    batch_size: int = 0


@dataclass(frozen=True, slots=True)
class EngineBeat:
    """The engine's process runs, however long its step takes. For EngineClient alone: no report."""


Report = EngineReady | EngineFailed | StepReport
