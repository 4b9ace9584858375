"""Whether steps run in compiled code, which is wanted where there is much to read and numba is installed.

Owns the decision, the folder where compiled code is kept, and a last look at the result. Without numba, on another
machine or for a model of another kind the answer is None, with a line in the log: torch computes the same, slower.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from worker.model.batch_layout import BatchLayout
from worker.model.compact_decoder import CompactDecoder
from worker.model.fast_attention import FastAttention
from worker.model.forward_batch import ForwardBatch, SequenceRows
from worker.model.kv_storage import KVStorage
from worker.model.linear import multiplies_bf16
from worker.model.model_error import ModelError
from worker.model.model_folder import cache_remedy
from worker.model.model_spec import LayerGeometry, ModelSpec

if TYPE_CHECKING:
    from worker.model.compiled.decoder import CompiledDecoder
    from worker.model.compiled.prompt_decoder import CompiledPrompts

# What is read faster than numba is imported.
SMALLEST_WEIGHTS_BYTES = 32 * 2**20
BLOCK_SIZE = 16
INT8 = "int8"
# Folders of code, one for each state of our sources: so many, the last used first, are left.
FOLDERS_MAX = 4
# Rounding over a whole model is up to a tenth of the logits' spread; a part that is wrong is far beyond.
TOLERANCE = 0.3
logger = logging.getLogger("headstart.model")
Looked = TypeVar("Looked")


class _LeftToTorch(Exception):
    """Why. `is_a_fault`: something else than a model or machine of another kind."""

    def __init__(self, why: str, *, is_a_fault: bool = False) -> None:
        super().__init__(why)
        self.is_a_fault = is_a_fault


def compile_decoder(compact: CompactDecoder, spec: ModelSpec, cache: Path) -> CompiledDecoder | None:
    """A compiled decoder that reads `compact`'s weights; its code is kept under `cache` for the next start.

    ModelError where weights are to be read in 8 bits, which torch does not do.
    """
    try:
        return _compiled(compact, spec, cache)
    except _LeftToTorch as left:
        if spec.weight_dtype == INT8:
            raise ModelError(f"--weight-dtype int8 is not for this model on this machine: {left}; "
                             "use --weight-dtype auto") from None
        logger.log(logging.WARNING if left.is_a_fault else logging.INFO, "decoding runs through torch: %s", left)
        return None


def _compiled(compact: CompactDecoder, spec: ModelSpec, cache: Path) -> CompiledDecoder:
    if spec.weights_bytes < SMALLEST_WEIGHTS_BYTES:
        raise _LeftToTorch(f"its weights are less than {SMALLEST_WEIGHTS_BYTES >> 20} MiB")
    if spec.dtype != "bfloat16" or sys.platform != "linux" or not multiplies_bf16(torch.device(spec.device)):
        raise _LeftToTorch("only bf16 on a CPU with AVX512-BF16 under Linux is decoded otherwise")
    try:
        import numba
    except ImportError:
        raise _LeftToTorch("numba is not installed") from None
    folder = numba.config.CACHE_DIR = place_for_code(cache)
    from worker.model.compiled.decoder import CompiledDecoder, NotCompiled

    def look() -> tuple[CompiledDecoder, float]:
        decoder = CompiledDecoder(compact, num_threads=torch.get_num_threads(), is_int8=spec.weight_dtype == INT8)
        return decoder, _distance(decoder, compact, spec.layers)

    say_what_is_kept(folder, cache)
    try:
        decoder, off = and_without_kept_code(folder, look)
    except NotCompiled as reason:
        raise _LeftToTorch(str(reason)) from None
    except Exception as error:      # of numba's many: this machine's compiler is not a reason not to serve
        raise _LeftToTorch(f"its code could not be compiled: {error!r}", is_a_fault=True) from error
    if not off <= TOLERANCE:        # NaN is not
        raise _LeftToTorch(f"compiled code is off by {off:.2f} of the logits' spread", is_a_fault=True)
    return decoder


def compile_prompts(decoder: CompiledDecoder, compact: CompactDecoder,
                    layers: Sequence[LayerGeometry]) -> CompiledPrompts | None:
    """What computes steps of many rows beside `decoder`, its code kept where that one's is."""
    import numba

    from worker.model.compiled.prompt_decoder import CompiledPrompts

    def look() -> tuple[CompiledPrompts, float]:
        prompts = CompiledPrompts(decoder)
        return prompts, _distance_of_prompts(prompts, compact, layers)

    try:
        prompts, off = and_without_kept_code(numba.config.CACHE_DIR, look)
    except Exception as error:
        logger.warning("prompts run through torch: their code could not be compiled: %r", error)
        return None
    if off <= TOLERANCE:
        return prompts
    logger.warning("prompts run through torch: compiled code is off by %.2f of the logits' spread", off)
    return None


def say_what_is_kept(folder: str, cache: Path) -> None:
    """A line in the log where this start takes longer than the next one, or all do."""
    if not folder:
        logger.warning("compiled code cannot be kept, so every start takes half a minute longer: %s",
                       cache_remedy(cache))
    elif not _kept_code(folder):
        logger.info("compiling the model's steps for this machine, once: about half a minute; kept in %s", folder)


def and_without_kept_code(folder: str, look: Callable[[], Looked]) -> Looked:
    """`look`, and again without what was kept where that may be why it failed: a file cut off by a full disk would
    be met at every start."""
    from worker.model.compiled.decoder import NotCompiled

    try:
        return look()
    except NotCompiled:
        raise
    except Exception as error:
        kept = _kept_code(folder)
        if not kept:
            raise
        logger.warning("code kept in %s cannot be used (%r) and is compiled anew", folder, error)
        for path in kept:
            path.unlink(missing_ok=True)
    return look()


def _kept_code(folder: str) -> list[Path]:
    """Numba's files; none where nothing can be kept."""
    return [path for path in Path(folder).rglob("*.nb?") if path.is_file()] if folder else []


def place_for_code(cache: Path) -> str:
    """The folder where code is kept, which is there then; "" where none can be made: compiled anew at each start."""
    folder = cache / f"compiled-{_source_digest()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
    except OSError:
        return ""
    _forget_older_code(cache)
    return str(folder) if os.access(folder, os.W_OK) else ""


def _forget_older_code(cache: Path) -> None:
    """Of versions that nobody has started for longest; one that is started again compiles again."""
    with contextlib.suppress(OSError):  # another start takes them away as well
        folders = sorted(cache.glob("compiled-*"), key=lambda found: found.stat().st_mtime, reverse=True)
        for folder in folders[FOLDERS_MAX:]:
            shutil.rmtree(folder, ignore_errors=True)


def _source_digest() -> str:
    """Of all that is compiled: numba looks for changes in the outermost function's file alone."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "compiled").glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@torch.inference_mode()
def _distance(decoder: CompiledDecoder, compact: CompactDecoder, layers: Sequence[LayerGeometry]) -> float:
    """How far logits are from the compact decoder's, as a share of their spread, at the end of a short prompt."""
    storage = _two_blocks(layers)
    batch = ForwardBatch(())
    for start in range(BLOCK_SIZE + 2):
        batch = ForwardBatch((SequenceRows((start % decoder.vocab_size,), start, (1, 0), start, True),))
        found = decoder.logits(batch, storage)
    return _off_by(found, compact, batch, storage)


@torch.inference_mode()
def _distance_of_prompts(prompts: CompiledPrompts, compact: CompactDecoder, layers: Sequence[LayerGeometry]) -> float:
    """The same of a short prompt computed at once."""
    storage = _two_blocks(layers)
    tokens = [token % prompts.vocab_size for token in range(BLOCK_SIZE + 2)]
    batch = ForwardBatch((SequenceRows(tokens, 0, (1, 0), 0, True),))
    return _off_by(prompts.logits(batch, storage), compact, batch, storage)


def _two_blocks(layers: Sequence[LayerGeometry]) -> KVStorage:
    return KVStorage.allocate(layers, num_blocks=2, block_size=BLOCK_SIZE, dtype=torch.bfloat16,
                              device=torch.device("cpu"), head_major=True)


def _off_by(found: torch.Tensor, compact: CompactDecoder, batch: ForwardBatch, storage: KVStorage) -> float:
    layout = BatchLayout.build(batch, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    expected = compact.logits(layout, FastAttention(layout, storage))
    return float((found - expected).square().mean().sqrt() / expected.float().std())
