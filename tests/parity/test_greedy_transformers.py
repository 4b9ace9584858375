"""Greedy output of our engine, rendered and tokenised by us, equals transformers' own in float32, token by token.

transformers renders, tokenises and generates from the same folder. Where its two best logits lie closer than
MARGIN_MIN, rounding decides and the prompt proves nothing: such a prompt must be replaced, never the check loosened.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.npm_tokenizers import npm_tokenizer
from tests.support.tiny_engine import EngineDriver
from worker.engine.engine_config import EngineConfig
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_chat, parse_completion
from worker.prompt.sampling_params import SamplingParams
from worker.prompt.tokenizer import TokenizerBundle

pytestmark = pytest.mark.model

NUM_TOKENS = 32
MARGIN_MIN = 1e-4
TEMPLATES = Path(__file__).parent.parent / "support" / "templates"


@dataclass
class Pair:
    """Our engine and transformers' model on one folder."""

    driver: EngineDriver
    renderer: PromptRenderer
    tokenizer: Any
    reference: Any
    generated: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def check(self, ours: list[int], theirs: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """Both prompts are equal, and so is what follows them. Returns the output."""
        assert ours == theirs
        request_id = f"r{len(self.driver.results)}"
        self.driver.submit(request_id, ours, num_tokens, params=SamplingParams(temperature=0.0))
        self.driver.run()
        result = self.driver.results[request_id, 0]
        if (key := tuple(theirs)) not in self.generated:
            self.generated[key] = self._generate(theirs, num_tokens)
        assert result.token_ids == self.generated[key]
        assert result.finish_reason == ("length" if len(result.token_ids) == num_tokens else "stop")
        return result.token_ids

    @torch.inference_mode()
    def _generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        output = self.reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=num_tokens, eos_token_id=list(self.driver.ready.eos_token_ids),
            pad_token_id=self.driver.ready.eos_token_ids[0], return_dict_in_generate=True, output_scores=True)
        best_two = torch.stack([scores[0].topk(2).values for scores in output.scores])
        margin = (best_two[:, 0] - best_two[:, 1]).min().item()
        assert margin >= MARGIN_MIN, f"a near tie ({margin:.1e}): choose another prompt"
        return [int(token) for token in output.sequences[0, len(prompt):]]

    def raw(self, text: str) -> list[int]:
        body = orjson.dumps({"model": "m", "prompt": text})
        ours = self.renderer.completion(parse_completion(body))[0]
        return self.check(ours, self.tokenizer(text)["input_ids"])

    def chat(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        body = {"model": "m", "messages": messages} | ({"tools": tools} if tools else {})
        ours = self.renderer.chat(parse_chat(orjson.dumps(body)))
        theirs = self.tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=True,
                                                    return_dict=True)["input_ids"]
        return self.check(ours, theirs)


def make_pair(model: str, *, chat_template: Path | None = None, max_context: int = 4096) -> Pair:
    driver = EngineDriver(EngineConfig(model=model, exactness="strict", device="cpu", kv_memory="512MiB",
                                       chat_template=chat_template, max_context=max_context))
    folder = Path(driver.ready.folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if chat_template is not None:
        tokenizer.chat_template = chat_template.read_text()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Pair(driver, PromptRenderer(TokenizerBundle.from_directory(folder, chat_template)), tokenizer, reference)


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Pair]:
    yield make_pair("smollm2")
    gc.collect()


@pytest.fixture(scope="module")
def gemma3() -> Iterator[Pair]:
    yield make_pair("gemma3", chat_template=TEMPLATES / "gemma_turns.jinja")
    gc.collect()


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A seeded two-layer Qwen3 with the real family's tokenizer and template."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-qwen3")
    for file in npm_tokenizer("qwen3").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    torch.manual_seed(7)
    config = Qwen3Config(vocab_size=151_936, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
                         initializer_range=0.3, bos_token_id=151_643, eos_token_id=151_645, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return make_pair(str(folder))


def long_text(num_words: int) -> str:
    """Prose that never repeats itself exactly."""
    seasons = ("spring", "summer", "autumn", "winter")
    lines = (f"In the {seasons[year % 4]} of {1200 + year} the village of Harrow counted {37 + 13 * year % 401} "
             f"sheep, {5 + year * year % 83} mills and one keeper of the bridge." for year in range(num_words // 20))
    return " ".join(lines)


def test_smollm2_raw(smollm2: Pair) -> None:
    assert len(smollm2.raw("The three primary colours are red, yellow and")) > 4


def test_smollm2_chat(smollm2: Pair) -> None:
    smollm2.chat([{"role": "system", "content": "You are a helpful assistant who answers briefly."},
                  {"role": "user", "content": "Why is the sky blue?"}])


def test_smollm2_several_turns(smollm2: Pair) -> None:
    smollm2.chat([{"role": "user", "content": "Name a river in France."},
                  {"role": "assistant", "content": "The Loire is a river in France."},
                  {"role": "user", "content": "And one in Germany?"}])


def test_smollm2_unicode(smollm2: Pair) -> None:
    smollm2.chat([{"role": "user", "content": "Übersetze ins Englische: «Der Bär 🐻 schläft — 日本語も少し。»"}])


def test_smollm2_three_thousand_tokens(smollm2: Pair) -> None:
    text = long_text(2000)
    assert 3000 <= len(smollm2.tokenizer(text)["input_ids"]) < 4000
    smollm2.raw(text)
    assert smollm2.driver.stats.computed_positions_total > 3000


def test_smollm2_a_warm_answer_is_the_same(smollm2: Pair) -> None:
    """The three thousand tokens again: nearly all are hits now, and transformers' cold answer still stands."""
    first = smollm2.raw(long_text(2000))
    hits = smollm2.driver.stats.hit_tokens_total
    assert smollm2.raw(long_text(2000)) == first
    assert smollm2.driver.stats.hit_tokens_total - hits >= 2990


def test_gemma3_raw_past_its_window(gemma3: Pair) -> None:
    text = long_text(450)
    assert len(gemma3.tokenizer(text)["input_ids"]) > 600
    gemma3.raw(text)


def test_gemma3_chat_with_a_template_file(gemma3: Pair) -> None:
    gemma3.chat([{"role": "system", "content": "Answer in one sentence."},
                 {"role": "user", "content": "What is the capital of Italy?"}])


def test_qwen3_tools(qwen3: Pair) -> None:
    weather = {"type": "function", "function": {
        "name": "get_weather", "description": "Current weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}
    messages = [{"role": "user", "content": "Do I need an umbrella in Zürich?"}]
    with_tools = qwen3.chat(messages, tools=[weather])
    assert with_tools != qwen3.chat(messages), "the tools must reach the model"
