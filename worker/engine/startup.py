"""From an EngineConfig to the parts of an engine: weights, KV storage, hash scheme, pool and scheduler, warmed up.

Owns the order of start-up and its one-line errors. Computes nothing for a user: the warm-up writes K/V that no block
hash points to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.core.block_pool import BlockPool
from worker.core.prefill_pace import TOKENS_MIN
from worker.core.scheduler import Batching, KvCacheMode, Scheduler, SchedulerConfig
from worker.engine.engine_config import EngineConfig, EngineSetupError
from worker.engine.grammar import GrammarCompiler
from worker.engine.kv_budget import num_kv_blocks
from worker.engine.model_runner import ModelRunner
from worker.engine.pacing import Pacer, measure_pace
from worker.engine.timings import EngineRates
from worker.engine.warm_up import WarmUp, measure_read_speed, other_memory_bytes
from worker.model.exactness_probe import probe_exactness
from worker.model.loader import load_model, resolve_model
from worker.model.lora_folder import LoraAdapter, named_folder, read_adapter
from worker.model.model_error import ModelError
from worker.model.model_folder import ModelFolder
from worker.model.model_spec import ModelSpec
from worker.model.paged_model import PagedModel, free_memory_bytes
from worker.prompt.tokenizer import TokenizerBundle
from worker.protocol.block_hash import HashScheme


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured of the device: bytes that a whole step needs beside weights and KV, bytes of everything else,
    and how many bytes a second its memory is read at."""

    activation_bytes: int
    other_bytes: int
    read_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Everything an Engine is made of. `notes` are lines for the start-up log.

    `eos_token_ids` end an answer: what the model's configuration names, and what ends a turn in its chat template.
    `pacer` is None without a target inter-token latency.
    """

    folder: ModelFolder
    model: PagedModel
    runner: ModelRunner
    scheduler: Scheduler
    rates: EngineRates
    eos_token_ids: tuple[int, ...]
    grammars: GrammarCompiler
    pacer: Pacer | None
    machine: Machine
    notes: tuple[str, ...]
    adapters: tuple[LoraAdapter, ...] = ()
    cpu_threads: int = 0


def start_up(config: EngineConfig, clock: Callable[[], float]) -> EngineParts:
    """Load and warm up. Raises EngineSetupError with one line for whatever the operator can mend."""
    if config.threads > 0:
        torch.set_num_threads(config.threads)
    try:
        folder = resolve_model(config.model, cache_dir=config.cache_dir, chat_template=config.chat_template)
        adapters = _read_adapters(config, folder)
        model = load_model(folder, dtype=config.weight_dtype, kv_dtype=config.kv_dtype, device=config.device,
                           exactness=config.exactness, block_size=config.block_size, adapters=adapters,
                           cache_dir=config.cache_dir)
        bundle = _read_tokenizer(config, folder)
        block_bytes = model.spec.kv_bytes_per_token * config.block_size
        num_blocks = num_kv_blocks(config.kv_memory, block_bytes=block_bytes,
                                   free_bytes=free_memory_bytes(model.spec.device))
        storage = model.make_storage(num_blocks)
    except ModelError as error:
        raise EngineSetupError(str(error)) from error
    scheduler = _make_scheduler(config, model, hash_scheme(config, folder, model, bundle), num_blocks)
    runner, rates = ModelRunner(model, storage, clock), EngineRates()
    eos_token_ids = tuple(dict.fromkeys((*model.spec.eos_token_ids, *bundle.eos_token_ids)))
    grammars = GrammarCompiler(bundle.tokenizer_json, vocab_size=model.spec.vocab_size, eos_token_ids=eos_token_ids)
    reading = grammars.warm_up()
    warm_up = _warm_up(config, runner, scheduler, model.spec)
    reading.join()      # or it would be measured too
    machine = _measure_machine(warm_up, model.spec, num_blocks * block_bytes, clock)
    warm_up.measure_rates(rates)
    pacer = _measure_pace(config, warm_up)
    scheduler.pace = None if pacer is None else pacer.pace
    return EngineParts(folder, model, runner, scheduler, rates, eos_token_ids, grammars, pacer, machine,
                       _notes(config, model, scheduler), adapters,
                       cpu_threads=torch.get_num_threads() if model.spec.device == "cpu" else 0)


def _read_adapters(config: EngineConfig, folder: ModelFolder) -> tuple[LoraAdapter, ...]:
    named = [named_folder(text) for text in config.lora]
    taken = {config.served_name or folder.name, folder.name, config.model}
    for name, _ in named:
        if name in taken:
            raise ModelError(f"--lora {name}=...: the name {name!r} is taken; requests choose adapters by name")
        taken.add(name)
    return tuple(read_adapter(name, path) for name, path in named)


def _warm_up(config: EngineConfig, runner: ModelRunner, scheduler: Scheduler, spec: ModelSpec) -> WarmUp:
    """Run what a first request would otherwise pay for."""
    warm_up = WarmUp(runner, block_size=config.block_size, vocab_size=spec.vocab_size,
                     num_tokens_max=config.max_batch_tokens, context_max=scheduler.max_context - 1)
    warm_up.run()
    return warm_up


def _measure_machine(warm_up: WarmUp, spec: ModelSpec, kv_bytes: int, clock: Callable[[], float]) -> Machine:
    activation_bytes = warm_up.measure_activation_bytes(spec.device)
    # On a CPU the pool's memory is not there before it is written to.
    known_bytes = spec.weights_bytes + (0 if spec.device == "cpu" else kv_bytes)
    return Machine(activation_bytes, other_memory_bytes(spec.device, known_bytes),
                   measure_read_speed(spec.device, clock))


def _measure_pace(config: EngineConfig, warm_up: WarmUp) -> Pacer | None:
    """None where the operator set no target."""
    if config.target_itl_ms <= 0:
        return None
    return Pacer(measure_pace(warm_up.step, target_s=config.target_itl_ms / 1000,
                              tokens_max=warm_up.num_tokens_max, context_max=warm_up.context_max))


def hash_scheme(config: EngineConfig, folder: ModelFolder, model: PagedModel, bundle: TokenizerBundle) -> HashScheme:
    """What this worker's block hashes stand for: everything that its K/V depend on."""
    read_as = filter(None, (model.spec.dtype, model.spec.weight_dtype))
    return HashScheme(block_size=config.block_size, seed=config.hash_seed, model=folder.name,
                      weights="/".join((folder.weights_revision, *read_as)),
                      tokenizer=bundle.tokenizer_digest, template=bundle.template_digest,
                      kv_dtype=model.spec.kv_dtype, exactness=config.exactness)


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
            kv_cache=KvCacheMode(config.kv_cache), max_context=config.max_context or model_max,
            batching=Batching(config.batching))
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
    if config.batching != Batching.CONTINUOUS:
        notes.append(f"batching is {config.batching}: for measuring only, a batch ends before the next begins.")
    if scheduler.pace is not None:
        tokens, deep = (scheduler.pace.tokens_within(scheduler.pace.target_s, start)
                        for start in (0, scheduler.max_context))
        notes.append(f"Beside decoding a step computes {min(tokens, config.max_batch_tokens)} prompt tokens, "
                     f"{max(TOKENS_MIN, min(deep, config.max_batch_tokens))} at the end of the context, for an "
                     f"inter-token latency {config.target_itl_ms:g} ms above that of decoding alone.")
    if config.exactness == "strict":
        notes.append(probe_exactness(model).note)
    return tuple(notes)
