"""GGUF to a Hugging Face folder: bf16 safetensors, config, tokenizer. Done once per file, kept in a cache folder.

Names and layouts come from transformers' own tables, so the result equals what transformers makes of the same file;
reading the header once and dequantising with numpy is only faster. Imports torch and transformers when called.
Never leaves half a folder under the final name, and never reads what another process is writing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from worker.model.gguf_file import GgufHeader, GgufTensor, read_gguf_header
from worker.model.model_error import ModelError
from worker.model.model_folder import RECORD_NAME, cache_remedy

# Part of every conversion's name: raise it when the same GGUF would give other bytes.
CONVERTER_VERSION = 1
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
# Tokens that end a turn. A GGUF names one EOS id, for some families not the one its chat turns end with.
_TURN_ENDS = ("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|end_of_text|>")
_SLAB_ELEMENTS = 2**24


def conversion_path(cache_dir: Path, name: str, source_digest: str) -> Path:
    """Where the conversion of a GGUF with this content digest lies, made or not."""
    return cache_dir / "models" / f"{name}-{_revision(source_digest)[:12]}"


def _revision(source_digest: str) -> str:
    return hashlib.sha256(f"{CONVERTER_VERSION}:{source_digest}".encode()).hexdigest()[:32]


def ensure_converted(target: Path, source_digest: str, find_gguf: Callable[[Path], Path]) -> None:
    """Make `target` from the GGUF that `find_gguf(scratch)` returns, unless it exists.

    Two processes may call this at once: a file lock lets one convert while the other waits, and the kernel drops it
    when its holder dies. The folder appears by one rename, so it is whole or absent.
    """
    if target.is_dir():
        return
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(target.name + ".lock")):
            if target.is_dir():
                return
            shutil.rmtree(partial, ignore_errors=True)    # a conversion that died
            scratch = partial / "scratch"
            scratch.mkdir(parents=True)
            _convert(find_gguf(scratch), partial, source_digest)
            shutil.rmtree(scratch)
            partial.rename(target)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelError(f"cannot write the converted model to {target} ({error.strerror or error}); free some space "
                         f"or {cache_remedy(target.parent.parent)}") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(gguf_path: Path, out: Path, source_digest: str) -> None:
    header = read_gguf_header(gguf_path)
    _refuse_unsupported(header, gguf_path)
    config = _config_of(header)
    _save_weights(gguf_path, header, config, out)
    config.save_pretrained(out)
    _save_generation_config(header, config, out)
    _tokenizer_of(gguf_path).save_pretrained(out)
    record = {"weights_revision": _revision(source_digest), "source_digest": source_digest,
              "converter_version": CONVERTER_VERSION}
    (out / RECORD_NAME).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _refuse_unsupported(header: GgufHeader, path: Path) -> None:
    if header.architecture not in ARCHITECTURES:
        raise ModelError(f"{path} holds a {header.architecture!r} model; GGUF is supported for "
                         f"{', '.join(ARCHITECTURES)}: use the model's safetensors folder instead")
    scaled = any(key.startswith(f"{header.architecture}.rope.scaling.") for key in header.metadata)
    if scaled or any(tensor.name == "rope_freqs.weight" for tensor in header.tensors):
        raise ModelError(f"{path} scales its rope, which transformers does not read from GGUF; use the model's "
                         "safetensors folder instead")


def _config_of(header: GgufHeader) -> Any:
    """A transformers config from the metadata, by transformers' table of GGUF keys."""
    import torch
    from transformers import AutoConfig
    from transformers.integrations import GGUF_CONFIG_MAPPING

    prefix = header.architecture + "."
    fields: dict[str, Any] = {}
    for key, field in GGUF_CONFIG_MAPPING[header.architecture].items():
        if field is not None and prefix + key in header.metadata:
            fields[field] = header.metadata[prefix + key]
    for key, field in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("unknown", "unk_token_id"),
                       ("padding", "pad_token_id")):
        if (token_id := header.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            fields[field] = token_id
    fields.setdefault("vocab_size", len(header.metadata["tokenizer.ggml.tokens"]))
    fields["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in header.tensors)
    config = AutoConfig.for_model(ARCHITECTURES[header.architecture], **fields)
    config.dtype = torch.bfloat16
    return config


def _save_weights(gguf_path: Path, header: GgufHeader, config: Any, out: Path) -> None:
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=config.to_dict())
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    names = get_gguf_hf_weights_map(skeleton, processor)
    blob = np.memmap(gguf_path, mode="r", dtype=np.uint8)
    tensors: dict[str, torch.Tensor] = {}
    for index, tensor in enumerate(header.tensors):
        _show_progress(out.name, index + 1, len(header.tensors))
        if tensor.name not in names:
            continue
        weights = processor.process(weights=_dequantised(blob, tensor), name=tensor.name).weights
        tensors[names[tensor.name]] = torch.from_numpy(weights).to(torch.bfloat16).contiguous()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := sorted(set(skeleton.state_dict()) - set(tensors) - tied):
        raise ModelError(f"{gguf_path} lacks {missing[0]} and {len(missing) - 1} more tensors; download it again")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)    # safetensors makes it 0600; config.json beside it is not


def _dequantised(blob: Any, tensor: GgufTensor) -> Any:
    """The tensor as float32 numpy, a slab of rows at a time: dequantising holds several temporaries of its input."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType(tensor.ggml_type)
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = tensor.shape[-1]
    num_rows, row_bytes = tensor.num_elements // columns, columns // block_elements * block_bytes
    rows = blob[tensor.offset:tensor.offset + num_rows * row_bytes].reshape(num_rows, row_bytes)
    out = np.empty((num_rows, columns), dtype=np.float32)
    step = max(1, _SLAB_ELEMENTS // columns)
    for begin in range(0, num_rows, step):
        part = np.ascontiguousarray(rows[begin:begin + step])
        out[begin:begin + step] = gguf.dequantize(part, kind).reshape(len(part), columns)
    return out.reshape(tensor.shape)


def _save_generation_config(header: GgufHeader, config: Any, out: Path) -> None:
    from transformers import GenerationConfig

    tokens: list[str] = header.metadata["tokenizer.ggml.tokens"]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    ends = {ids[token] for token in _TURN_ENDS if token in ids}
    if config.eos_token_id is not None:
        ends.add(config.eos_token_id)
    GenerationConfig(bos_token_id=config.bos_token_id, pad_token_id=config.pad_token_id,
                     eos_token_id=sorted(ends) or None).save_pretrained(out)


def _tokenizer_of(gguf_path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name, local_files_only=True)


def _show_progress(name: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\rconverting {name.removesuffix('.partial')} (once): {done}/{total} tensors{end}", end="",
              file=sys.stderr, flush=True)
