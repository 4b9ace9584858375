"""Requests meet a model's template and vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.tiny_tokenizer import write_tiny_tokenizer
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from worker.prompt.tokenizer import TokenizerBundle
from worker.protocol.api_error import ApiError

HI = [{"role": "user", "content": "the cat"}]
TOOL = {"type": "function", "function": {"name": "f"}}
WITH_TOOLS = "{% for t in tools or [] %}{{ t.function.name }}|{% endfor %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> TokenizerBundle:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_tokenizer(folder)
    return TokenizerBundle.from_directory(folder)


@pytest.fixture(scope="module")
def renderer(bundle: TokenizerBundle) -> PromptRenderer:
    return PromptRenderer(bundle)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def with_templates(bundle: TokenizerBundle, **templates: str) -> PromptRenderer:
    return PromptRenderer(msgspec.structs.replace(bundle, chat_templates=templates))


def test_chat_is_the_text_without_further_special_tokens(renderer: PromptRenderer) -> None:
    request = parse_chat(body(messages=HI))
    text = renderer.chat_text(request)
    assert text == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.chat(request) == renderer.tokenizer.encode(text, add_special_tokens=False)


def test_completion_prompts_keep_their_order(renderer: PromptRenderer) -> None:
    texts = ["the cat", "hello"]
    first, second = renderer.tokenizer.encode_many(texts, add_special_tokens=True)
    assert renderer.completion(parse_completion(body(prompt=texts))) == [first, second]
    assert renderer.completion(parse_completion(body(prompt=[[5, 6], [7]]))) == [[5, 6], [7]]
    assert renderer.completion(parse_completion(body(prompt=[5, 6]))) == [[5, 6]]


def test_no_template(bundle: TokenizerBundle) -> None:
    with pytest.raises(ApiError, match="--chat-template") as raised:
        with_templates(bundle).chat(parse_chat(body(messages=HI)))
    assert (raised.value.status, raised.value.param) == (400, "messages")


def test_tools_need_a_template_that_reads_them(bundle: TokenizerBundle, renderer: PromptRenderer) -> None:
    asked = parse_chat(body(messages=HI, tools=[TOOL]))
    with pytest.raises(ApiError, match="no place for tools") as raised:
        renderer.chat(asked)
    assert raised.value.param == "tools"
    assert with_templates(bundle, default=WITH_TOOLS).chat_text(asked) == "f|the cat"


def test_the_tool_template_is_used_with_tools_only(bundle: TokenizerBundle) -> None:
    both = with_templates(bundle, default="plain", tool_use=WITH_TOOLS)
    assert both.chat_text(parse_chat(body(messages=HI, tools=[TOOL]))) == "f|the cat"
    assert both.chat_text(parse_chat(body(messages=HI))) == "plain"
    assert both.chat_text(parse_chat(body(messages=HI, tools=[TOOL], tool_choice="none"))) == "plain"


@pytest.mark.parametrize(("fields", "param"), [
    ({"prompt": ""}, "prompt"), ({"prompt": ["the", ""]}, "prompt[1]"), ({"prompt": [[5], []]}, "prompt[1]"),
    ({"prompt": [384]}, "prompt"), ({"prompt": [[5], [0, 384]]}, "prompt[1]"), ({"prompt": [2**32 - 1]}, "prompt"),
    ({"prompt": "a", "logit_bias": {"384": 1}}, "logit_bias"),
])
def test_ids_stay_inside_the_vocabulary(renderer: PromptRenderer, fields: dict[str, Any], param: str) -> None:
    assert renderer.tokenizer.vocab_size == 384
    with pytest.raises(ApiError) as raised:
        renderer.completion(parse_completion(body(**fields)))
    assert (raised.value.status, raised.value.param) == (400, param)
    assert renderer.completion(parse_completion(body(prompt=[383], logit_bias={"383": 1}))) == [[383]]


def test_text_may_not_name_a_token_without_an_embedding(bundle: TokenizerBundle) -> None:
    """Gemma 3's text models: their tokenizer knows an image placeholder behind their last row."""
    small = PromptRenderer(msgspec.structs.replace(bundle, model_vocab_size=2))
    with pytest.raises(ApiError, match="vocabulary of 2") as raised:
        small.chat(parse_chat(body(messages=HI)))
    assert raised.value.param == "messages"


def test_an_empty_rendering(bundle: TokenizerBundle) -> None:
    with pytest.raises(ApiError, match="no tokens"):
        with_templates(bundle, default="{# nothing #}").chat(parse_chat(body(messages=HI)))


def test_tokenize_both_ways(renderer: PromptRenderer) -> None:
    plain = renderer.tokenize(parse_tokenize(body(prompt="the cat")))
    assert plain == renderer.tokenizer.encode("the cat", add_special_tokens=True)
    assert renderer.tokenize(parse_tokenize(body(messages=HI))) == renderer.chat(parse_chat(body(messages=HI)))
    assert renderer.tokenize(parse_tokenize(body(prompt=""))) == []


def test_detokenize(renderer: PromptRenderer) -> None:
    ids = renderer.chat(parse_chat(body(messages=HI)))
    assert renderer.detokenize(parse_detokenize(body(tokens=ids))).startswith("<|im_start|>user\nthe cat<|im_end|>")
    assert renderer.detokenize(parse_detokenize(body(tokens=[]))) == ""
    with pytest.raises(ApiError) as raised:
        renderer.detokenize(parse_detokenize(body(tokens=[384])))
    assert raised.value.param == "tokens"


def test_a_bundle_renders_alike_after_the_wire(bundle: TokenizerBundle, renderer: PromptRenderer) -> None:
    request = parse_chat(body(messages=[*HI, {"role": "assistant", "content": "é🌦"}]))
    assert PromptRenderer(TokenizerBundle.from_wire(bundle.to_wire())).chat(request) == renderer.chat(request)


def test_the_prompt_package_needs_no_torch_and_no_transformers() -> None:
    import subprocess
    import sys

    script = ("import sys, worker.prompt.renderer, worker.prompt.detokenizer; "
              "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])")
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
