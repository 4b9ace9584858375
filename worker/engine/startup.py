"""From an EngineConfig to the parts of an engine: weights, KV storage, hash scheme, pool and scheduler, warmed up.

Owns the order of start-up and its one-line errors. Computes nothing for a user: the warm-up writes K/V that no block
hash points to.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from worker.core.batch import ScheduledSequence, StepPlan
from worker.core.block_pool import BlockPool
from worker.core.scheduler import KvCacheMode, Scheduler, SchedulerConfig
from worker.engine.engine_config import EngineConfig, EngineSetupError
from worker.engine.grammar import GrammarCompiler
from worker.engine.kv_budget import num_kv_blocks
from worker.engine.model_runner import ModelRunner
from worker.engine.timings import EngineRates
from worker.model.exactness_probe import probe_exactness
from worker.model.loader import load_model, resolve_model
from worker.model.lora_folder import LoraAdapter, named_folder, read_adapter
from worker.model.model_error import ModelError
from worker.model.model_folder import ModelFolder
from worker.model.paged_model import PagedModel, free_memory_bytes
from worker.model.sampler import SamplerRow
from worker.prompt.sampling_params import SamplingParams
from worker.prompt.tokenizer import TokenizerBundle
from worker.protocol.block_hash import HashScheme

WARM_UP_PREFILL_TOKENS = 128    # what is measured; before that, a whole step's worth is run once
WARM_UP_DECODE_STEPS = 3
# Every operator of the sampler runs once before the first user needs it.
WARM_UP_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, min_p=0.01, logprobs=1)
WARM_UP_SEQ_ID = -1     # never a real sequence's


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything an Engine is made of. `notes` are lines for the start-up log.

    `eos_token_ids` end an answer: what the model's configuration names, and what ends a turn in its chat template.
    """

    folder: ModelFolder
    model: PagedModel
    runner: ModelRunner
    scheduler: Scheduler
    rates: EngineRates
    eos_token_ids: tuple[int, ...]
    grammars: GrammarCompiler
    notes: tuple[str, ...]
    adapters: tuple[LoraAdapter, ...] = ()


def start_up(config: EngineConfig, clock: Callable[[], float]) -> EngineParts:
    """Load and warm up. Raises EngineSetupError with one line for whatever the operator can mend."""
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    try:
        folder = resolve_model(config.model, cache_dir=config.cache_dir, chat_template=config.chat_template)
        adapters = _read_adapters(config, folder)
        model = load_model(folder, kv_dtype=config.kv_dtype, device=config.device, exactness=config.exactness,
                           block_size=config.block_size, adapters=adapters)
        bundle = _read_tokenizer(config, folder)
        num_blocks = num_kv_blocks(config.kv_memory, block_bytes=model.spec.kv_bytes_per_token * config.block_size,
                                   free_bytes=free_memory_bytes(model.spec.device))
        storage = model.make_storage(num_blocks)
    except ModelError as error:
        raise EngineSetupError(str(error)) from error
    scheduler = _make_scheduler(config, model, hash_scheme(config, folder, model, bundle), num_blocks)
    runner = ModelRunner(model, storage, clock)
    rates = EngineRates()
    warm_up(runner, rates, num_tokens=min(scheduler.max_context - 1, config.max_batch_tokens),
            block_size=config.block_size, vocab_size=model.spec.vocab_size)
    eos_token_ids = tuple(dict.fromkeys((*model.spec.eos_token_ids, *bundle.eos_token_ids)))
    grammars = GrammarCompiler(bundle.tokenizer_json, vocab_size=model.spec.vocab_size, eos_token_ids=eos_token_ids)
    return EngineParts(folder, model, runner, scheduler, rates, eos_token_ids, grammars,
                       _notes(config, model, scheduler), adapters)


def _read_adapters(config: EngineConfig, folder: ModelFolder) -> tuple[LoraAdapter, ...]:
    named = [named_folder(text) for text in config.lora]
    taken = {config.served_name or folder.name, folder.name, config.model}
    for name, _ in named:
        if name in taken:
            raise ModelError(f"--lora {name}=...: the name {name!r} is taken; requests choose adapters by name")
        taken.add(name)
    return tuple(read_adapter(name, path) for name, path in named)


def hash_scheme(config: EngineConfig, folder: ModelFolder, model: PagedModel, bundle: TokenizerBundle) -> HashScheme:
    """What this worker's block hashes stand for: everything that its K/V depend on."""
    return HashScheme(block_size=config.block_size, seed=config.hash_seed, model=folder.name,
                      weights=folder.weights_revision, tokenizer=bundle.tokenizer_digest,
                      template=bundle.template_digest, kv_dtype=model.spec.kv_dtype, exactness=config.exactness)


def warm_up(runner: ModelRunner, rates: EngineRates, *, num_tokens: int, block_size: int, vocab_size: int) -> None:
    """A step's worth of prompt and some decoding, unmeasured: it pays for what libraries put off, at the shapes that
    a first request will have. Then a short prompt and a few decode steps, measured."""
    num_tokens = max(1, num_tokens)
    for measured in (False, True):
        length = min(num_tokens, WARM_UP_PREFILL_TOKENS) if measured else num_tokens
        sampling = SamplingParams(temperature=0.0) if measured else WARM_UP_SAMPLING
        step = partial(_warm_up_step, runner, sampling, block_size=block_size, vocab_size=vocab_size)
        prefill_s = step(range(length))
        decode_s = statistics.median(step(range(length, length + 1)) for _ in range(WARM_UP_DECODE_STEPS))
        if measured:
            rates.observe(prefill_tokens=length, decode_rows=0, step_s=prefill_s)
            rates.observe(prefill_tokens=0, decode_rows=1, step_s=decode_s)


def _warm_up_step(runner: ModelRunner, sampling: SamplingParams, positions: range, *, block_size: int,
                  vocab_size: int) -> float:
    token_ids = [position % vocab_size for position in positions]
    num_blocks = -(-positions.stop // block_size)
    share = ScheduledSequence(seq_id=WARM_UP_SEQ_ID, token_ids=token_ids, start=positions.start,
                              block_table=list(range(num_blocks)), write_from=positions.start, samples=True)
    row = SamplerRow(sampling, choice=0, output_index=0, prompt_token_ids=token_ids,
                     output_token_ids=())
    outcome = runner.run(StepPlan(0, (share,), num_tokens=len(positions)), {WARM_UP_SEQ_ID: row})
    return outcome.forward_s + outcome.sample_s


def _read_tokenizer(config: EngineConfig, folder: ModelFolder) -> TokenizerBundle:
    try:
        return TokenizerBundle.from_directory(folder.path, folder.chat_template)
    except (OSError, ValueError) as error:
        raise EngineSetupError(f"The tokenizer of {config.model} cannot be read: {error}") from error


def _make_scheduler(config: EngineConfig, model: PagedModel, scheme: HashScheme, num_blocks: int) -> Scheduler:
    model_max = model.spec.max_context
    if config.max_context is not None and config.max_context > model_max:
        raise EngineSetupError(f"max_context {config.max_context} is beyond the {model_max} tokens that "
                               f"{config.model} was made for: lower it.")
    try:
        settings = SchedulerConfig(
            max_batch_tokens=config.max_batch_tokens, max_running=config.max_running,
            max_waiting=config.max_waiting + config.max_running,  # the shell bounds what is open; never refuse twice
            kv_cache=KvCacheMode(config.kv_cache), max_context=config.max_context or model_max)
        caching = settings.kv_cache is KvCacheMode.FULL
        scheduler = Scheduler(BlockPool(num_blocks, config.block_size, scheme, caching=caching), settings)
    except ValueError as error:
        raise EngineSetupError(str(error)) from error
    if scheduler.max_context < 2:
        raise EngineSetupError(f"kv_memory {config.kv_memory} holds no prompt and its answer: raise it.")
    return scheduler


def _notes(config: EngineConfig, model: PagedModel, scheduler: Scheduler) -> tuple[str, ...]:
    notes = []
    wanted = config.max_context or model.spec.max_context
    if scheduler.max_context < wanted:
        notes.append(f"The context is capped at {scheduler.max_context} of {wanted} tokens: one sequence must fit "
                     f"into the KV pool ({config.kv_memory}).")
    if config.kv_cache != "full":
        notes.append(f"kv_cache is {config.kv_cache}: for measuring only, prefixes are not shared.")
    if config.exactness == "strict":
        notes.append(probe_exactness(model).note)
    return tuple(notes)
