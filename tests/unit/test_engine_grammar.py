"""Grammars in the engine: what comes out always fits, whatever else happens to the sequence; bad ones are refused."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.json_schemas import random_schema, validates
from tests.support.tiny_engine import EngineDriver, Finished, config_for, tokens
from tests.support.tiny_tokenizer import EOS, tiny_tokenizer
from worker.engine.grammar import COMPILED_MAX, GrammarCompiler, GrammarError, Matcher
from worker.engine.messages import SubmitSequence
from worker.prompt.grammar_spec import ANY_OBJECT, GrammarKind, GrammarSpec
from worker.prompt.sampling_params import SamplingParams
from worker.prompt.tool_grammar import tool_call_grammar
from worker.prompt.tool_parser import ToolCallParser
from worker.prompt.tool_style import HERMES, LLAMA3, MISTRAL, ToolStyle

NUM_SCHEMAS = 200
EOS_ID = tiny_tokenizer().token_to_id(EOS)
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 2, 3]}},
          "required": ["name", "age"], "additionalProperties": False}


def spec(schema: object) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "response_format")


def submit(driver: EngineDriver, request_id: str, grammar: GrammarSpec, *, seed: int = 0, choice: int = 0,
           length: int = 24, max_new: int = 1000, **params: Any) -> None:
    driver.results[request_id, choice] = Finished()
    driver.engine.submit(SubmitSequence(
        request_id, choice, tokens(seed, length), SamplingParams(**{"temperature": 1.0, "seed": seed, **params}),
        max_new, frozenset(), grammar=grammar))


def text_of(result: Finished) -> str:
    assert result.finish_reason == "stop", result
    assert result.token_ids[-1] == EOS_ID
    return str(tiny_tokenizer().decode(result.token_ids[:-1], skip_special_tokens=False))


def test_answers_to_200_random_schemas_parse_and_validate(driver: EngineDriver) -> None:
    draw = random.Random(5)
    schemas = [random_schema(draw) for _ in range(NUM_SCHEMAS)]
    for index, schema in enumerate(schemas):
        submit(driver, f"r{index}", spec(schema), seed=index)
    driver.run()
    for index, schema in enumerate(schemas):
        text = text_of(driver.results[f"r{index}", 0])
        assert validates(json.loads(text), schema), (schema, text)


@pytest.mark.parametrize("params", [
    {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 0.9}, {"logit_bias": {300: 100.0}},
    {"repetition_penalty": 1.5, "presence_penalty": 2.0}, {"ignore_eos": True}, {"min_tokens": 900}])
def test_no_other_setting_leads_out_of_the_grammar(driver: EngineDriver, params: dict[str, Any]) -> None:
    submit(driver, "r", spec(PERSON), **params)
    driver.run()
    assert set(json.loads(text_of(driver.results["r", 0]))) == {"name", "age"}


def test_choices_go_their_own_ways(driver: EngineDriver) -> None:
    for choice in range(4):
        submit(driver, "n", spec(PERSON), seed=3, choice=choice)
    driver.run()
    texts = [text_of(driver.results["n", choice]) for choice in range(4)]
    assert all(set(json.loads(text)) == {"name", "age"} for text in texts)
    assert len(set(texts)) > 1


def test_a_preempted_answer_is_the_same(tiny_llama: Path) -> None:
    schema = {"type": "array", "items": {"enum": ["left", "right", "up"]}, "minItems": 12, "maxItems": 12}
    alone = EngineDriver(config_for(tiny_llama))
    block_bytes = alone.ready.kv_bytes_per_token * 16
    for seed in range(4):
        submit(alone, f"r{seed}", spec(schema), seed=seed, length=100, max_new=400)
        alone.run()
    tight = EngineDriver(config_for(tiny_llama, kv_memory=f"{34 * block_bytes}B"))
    for seed in range(4):
        submit(tight, f"r{seed}", spec(schema), seed=seed, length=100, max_new=400)
    tight.run()
    assert tight.preemptions
    for seed in range(4):
        assert tight.results[f"r{seed}", 0].token_ids == alone.results[f"r{seed}", 0].token_ids
        assert len(json.loads(text_of(tight.results[f"r{seed}", 0]))) == 12


@pytest.mark.parametrize(("schema", "says"), [
    ({"type": "objekt"}, "objekt"), ({"$ref": "#/nowhere"}, "nowhere"), ({"not": {}}, "not"), ({"enum": []}, "empty"),
    ({"type": "string", "pattern": "("}, "unclosed"), ([1], ""), (False, "")])
def test_a_schema_that_cannot_be_followed_is_refused_before_it_is_queued(driver: EngineDriver, schema: object,
                                                                         says: str) -> None:
    submit(driver, "bad", spec(schema))
    assert not driver.engine._live
    report = driver.step()
    [output] = report.outputs
    assert (output.finish_reason, output.error_param) == ("error", "response_format")
    assert says in (output.error or "")
    assert "\n" not in (output.error or "")


def test_a_grammar_too_large_to_follow_ends_its_sequence_and_no_other(driver: EngineDriver) -> None:
    submit(driver, "bad", spec(PERSON))
    submit(driver, "good", spec(PERSON), seed=1)
    driver.step()
    [bad] = [live for live in driver.engine._live.values() if live.command.request_id == "bad"]
    assert bad.matcher is not None
    bad.matcher._inner.consume_token(EOS_ID)    # nothing of the grammar: from here the matcher has no way on
    driver.run()
    result = driver.results["bad", 0]
    assert (result.finish_reason, result.stats is not None) == ("error", True)
    assert set(json.loads(text_of(driver.results["good", 0]))) == {"name", "age"}
    assert driver.stats.blocks_used == 0
    driver.engine.scheduler.check_invariants()


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer().to_str().encode(), vocab_size=384, eos_token_ids=[EOS_ID])


def walk(matcher: Matcher, draw: random.Random) -> str:
    """A random answer that the grammar allows."""
    token_ids: list[int] = []
    while True:
        allowed = [index for index in range(384) if matcher.allowed[index // 8] >> index % 8 & 1]
        token_id = draw.choice(allowed)
        if token_id == EOS_ID:
            return str(tiny_tokenizer().decode(token_ids, skip_special_tokens=False))
        token_ids.append(token_id)
        matcher.advance([token_id])
        assert matcher.error is None


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **parameters}}


TOOLS = [tool("weather", parameters={"type": "object", "properties": {"city": {"$ref": "#/$defs/c"}},
                                     "required": ["city"], "additionalProperties": False,
                                     "$defs": {"c": {"enum": ["Rome", "</tool_call>", "]}\""]}}}),
         tool('sa"y ñ', parameters={"type": "object", "properties": {}, "additionalProperties": False}),
         tool("bare")]


@pytest.mark.parametrize("style", [HERMES, LLAMA3, MISTRAL], ids=lambda style: style.name)
@pytest.mark.parametrize("parallel", [False, True])
def test_what_the_tool_grammar_allows_the_parser_reads(style: ToolStyle, parallel: bool) -> None:
    text = tool_call_grammar(style, TOOLS, marker_id=None, parallel=parallel)
    matcher = compiler().matcher(GrammarSpec(GrammarKind.LARK, text, "tools"))
    draw = random.Random(1)
    names, counts = set(), set()
    for _ in range(40):
        parser = ToolCallParser(style, [item["function"]["name"] for item in TOOLS])
        parsed = parser.push(walk(matcher.copy(), draw))
        assert parsed.text + parser.finish() == ""
        names |= {call.name for call in parsed.calls}
        counts.add(len(parsed.calls))
        for call in parsed.calls:
            assert set(json.loads(call.arguments)) == ({"city"} if call.name == "weather" else set())
    assert names == {"weather", 'sa"y ñ', "bare"}
    assert counts == {1} if not parallel else {1, 2} <= counts


def test_an_answer_or_calls_where_both_are_allowed() -> None:
    text = tool_call_grammar(HERMES, TOOLS[2:], marker_id=None, parallel=False, answer_schema='{"enum":["yes"]}')
    matcher = compiler().matcher(GrammarSpec(GrammarKind.LARK, text, "response_format"))
    answers = {walk(matcher.copy(), random.Random(seed)).replace(" ", "").replace("\n", "") for seed in range(40)}
    assert '"yes"' in answers
    assert any(answer.startswith("<tool_call>") for answer in answers)


def test_a_special_marker_is_its_token() -> None:
    text = tool_call_grammar(MISTRAL, TOOLS[2:], marker_id=1, parallel=False)
    matcher = compiler().matcher(GrammarSpec(GrammarKind.LARK, text, "tools"))
    assert [index for index in range(384) if matcher.allowed[index // 8] >> index % 8 & 1] == [1]


def test_compiled_grammars_are_bounded_and_kept() -> None:
    one = compiler()
    for index in range(COMPILED_MAX + 5):
        one.prepare(spec({"const": index}))
    assert len(one._compiled) == COMPILED_MAX
    one.prepare(GrammarSpec(GrammarKind.JSON_SCHEMA, "{", "response_format"))
    with pytest.raises(GrammarError):
        one.matcher(GrammarSpec(GrammarKind.JSON_SCHEMA, "{", "response_format"))
    with pytest.raises(GrammarError, match=r"^no text can match it$"):
        one.matcher(spec({"$ref": "#"}))
    assert one.matcher(GrammarSpec(GrammarKind.JSON_SCHEMA, ANY_OBJECT, "response_format")).error is None
