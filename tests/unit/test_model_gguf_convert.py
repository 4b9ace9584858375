"""GGUF: our header reader against gguf's, our conversion against the model the file was made from, and accidents."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.support.tiny_gguf import ARCHITECTURES, write_tiny_gguf
from tests.support.tiny_models import tiny_model_folder
from worker.model.gguf_convert import conversion_path, ensure_converted
from worker.model.gguf_file import read_gguf_header
from worker.model.loader import load_model, resolve_model
from worker.model.model_error import ModelError


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path, "llama")
    return path


class TestHeader:
    def test_says_what_the_gguf_package_says(self, tiny_gguf: Path) -> None:
        ours, theirs = read_gguf_header(tiny_gguf), gguf.GGUFReader(tiny_gguf)
        assert ours.architecture == "llama"
        expected = {tensor.name: (tuple(int(n) for n in reversed(tensor.shape)), int(tensor.tensor_type),
                                  int(tensor.data_offset)) for tensor in theirs.tensors}
        assert {tensor.name: (tensor.shape, tensor.ggml_type, tensor.offset) for tensor in ours.tensors} == expected
        for key, value in ours.metadata.items():
            found = theirs.fields[key].contents()
            assert value == (list(found) if isinstance(found, (list, np.ndarray)) else found), key

    @settings(deadline=None, max_examples=150)
    @given(data=st.data())
    def test_damage_is_an_error_in_words_or_harmless(self, data: st.DataObject, tiny_gguf: Path,
                                                     tmp_path_factory: pytest.TempPathFactory) -> None:
        blob = bytearray(tiny_gguf.read_bytes()[:6000])
        for _ in range(data.draw(st.integers(1, 4))):
            blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
        path = tmp_path_factory.getbasetemp() / "damaged.gguf"
        path.write_bytes(blob[:data.draw(st.integers(0, len(blob)))])
        with pytest.raises(ModelError, match=r"damaged\.gguf"):
            read_gguf_header(path)    # it is cut short in any case


class TestConversion:
    @pytest.mark.parametrize("family", ARCHITECTURES)
    def test_gives_the_model_back(self, family: str, tmp_path: Path) -> None:
        path = tmp_path / f"{family}.gguf"
        write_tiny_gguf(path, family)
        folder = resolve_model(str(path), cache_dir=tmp_path / "cache")
        converted = load_file(folder.path / "model.safetensors")
        original = AutoModelForCausalLM.from_pretrained(tiny_model_folder(family), dtype=torch.float32).state_dict()
        assert set(converted) == set(original) - ({"lm_head.weight"} if family == "gemma3" else set())
        for name, weight in converted.items():
            expected = original[name]
            if family == "gemma3" and name.endswith("norm.weight"):
                expected = (expected + 1) - 1    # the file holds it as w + 1 in float32
            assert torch.equal(weight, expected.to(torch.bfloat16)), name

    @pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
    def test_equals_what_transformers_reads(self, kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
        path = tmp_path / "tiny.gguf"
        write_tiny_gguf(path, "llama", quantisation=kind)
        folder = resolve_model(str(path), cache_dir=tmp_path)
        config = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        expected = load_gguf_checkpoint(path, return_tensors=True, model_to_load=skeleton)["tensors"]
        found = load_file(folder.path / "model.safetensors")
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], expected[name].to(torch.bfloat16)) for name in found)
        ours = AutoConfig.from_pretrained(folder.path).to_dict()
        for key, value in config.to_dict().items():
            if key not in ("dtype", "_name_or_path", "_model_name_or_path", "architectures", "transformers_version"):
                assert ours[key] == value, key

    def test_the_tokenizer_comes_along(self, tiny_gguf: Path, tmp_path: Path) -> None:
        folder = resolve_model(str(tiny_gguf), cache_dir=tmp_path)
        tokenizer, original = (AutoTokenizer.from_pretrained(path)
                               for path in (folder.path, tiny_model_folder("llama")))
        for text in ("the quick brown fox", "Übung 🐻 12345", "<|im_start|>user\nhi<|im_end|>\n"):
            assert tokenizer(text).input_ids == original(text).input_ids
        assert tokenizer.chat_template == original.chat_template
        assert load_model(folder).spec.eos_token_ids == (2,)

    def test_the_revision_names_the_content(self, tiny_gguf: Path, tmp_path: Path) -> None:
        first = resolve_model(str(tiny_gguf), cache_dir=tmp_path)
        moved = tmp_path / "other-name.gguf"
        moved.write_bytes(tiny_gguf.read_bytes())
        second = resolve_model(str(moved), cache_dir=tmp_path / "elsewhere")
        assert first.weights_revision == second.weights_revision
        assert (first.name, second.name) == ("tiny", "other-name")


class TestAccidents:
    def test_a_half_made_conversion_is_made_again(self, tiny_gguf: Path, tmp_path: Path) -> None:
        target = conversion_path(tmp_path, "tiny", "digest")
        partial = target.with_name(target.name + ".partial")
        partial.mkdir(parents=True)
        (partial / "config.json").write_text("{")
        ensure_converted(target, "digest", lambda scratch: tiny_gguf)
        assert json.loads((target / "config.json").read_text())["model_type"] == "llama"
        assert not partial.exists()

    def test_a_failure_leaves_no_folder(self, tmp_path: Path) -> None:
        bad = tmp_path / "bad.gguf"
        bad.write_bytes(b"GGUF" + bytes(3))
        with pytest.raises(ModelError, match="download it again"):
            resolve_model(str(bad), cache_dir=tmp_path / "cache")
        assert [path.suffix for path in (tmp_path / "cache" / "models").iterdir() if path.is_file()] == [".lock"]
        assert not list((tmp_path / "cache").glob("models/*/config.json"))

    def test_a_cache_that_is_a_file(self, tiny_gguf: Path, tmp_path: Path) -> None:
        (tmp_path / "cache").write_text("")
        with pytest.raises(ModelError, match="HEADSTART_CACHE_DIR"):
            resolve_model(str(tiny_gguf), cache_dir=tmp_path / "cache")

    def test_an_architecture_we_do_not_read(self, tmp_path: Path) -> None:
        path = tmp_path / "bert.gguf"
        writer = gguf.GGUFWriter(path, "bert")
        writer.add_name("bert")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(ModelError, match="'bert'"):
            resolve_model(str(path), cache_dir=tmp_path)

    def test_two_processes_at_once(self, tiny_gguf: Path, tmp_path: Path) -> None:
        """Both end with the same whole folder, and nothing half made stays behind."""
        code = ("import sys; from pathlib import Path; from worker.model.loader import load_model, resolve_model; "
                "folder = resolve_model(sys.argv[1], cache_dir=Path(sys.argv[2])); load_model(folder); "
                "print(folder.path, folder.weights_revision)")
        running = [subprocess.Popen([sys.executable, "-c", code, str(tiny_gguf), str(tmp_path)], text=True,
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        answers = [process.communicate(timeout=240) for process in running]
        assert [process.returncode for process in running] == [0, 0], answers
        assert answers[0][0] == answers[1][0]
        assert sorted(path.suffix for path in (tmp_path / "models").iterdir() if path.is_file()) == [".lock"]
        assert not list((tmp_path / "models").glob("*.partial"))
