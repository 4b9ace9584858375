"""Keys to tenants; the keys file and its complaints; public texts by token ids."""

from __future__ import annotations

import json
import logging

import pytest

from gateway import new_key
from gateway.admission.keys_file import KeysError, api_keys_problem, read_keys
from gateway.admission.public_prefixes import PublicPrefix, PublicPrefixes, common_length
from gateway.admission.tenants import ANYONE, Tenant, hash_key, named_group, own_group
from gateway.config import GatewayConfig
from tests.support.stub_worker import byte_bundle
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import parse_chat
from worker.protocol.api_error import ApiError
from worker.protocol.settings import SettingsError, load_settings, render_settings

KEY_A, KEY_B = "hs-key-of-tenant-a-0001", "hs-key-of-tenant-b-0001"


def entry(tenant_id: str, *keys: str, **more: object) -> str:
    lines = [f"{name} = {json.dumps(value)}" for name, value in more.items()]
    hashes = json.dumps([hash_key(key) for key in keys])
    return "\n".join(["[[tenants]]", f'id = "{tenant_id}"', f"keys = {hashes}", *lines])


def test_a_key_opens_its_tenant_and_nothing_else_does() -> None:
    directory = read_keys(entry("a", KEY_A, "second-key-of-a-0001", models=["m"], weight=2.5, max_concurrent=3)
                          + "\n" + entry("b", KEY_B, group="team")).directory
    found = directory.authenticate(KEY_A)
    assert found is directory.authenticate("second-key-of-a-0001")
    assert found is not None
    assert (found.tenant_id, found.sharing_group, found.models) == ("a", own_group("a"), frozenset({"m"}))
    assert (found.limits.weight, found.limits.max_concurrent, found.limits.tokens_per_minute) == (2.5, 3, None)
    other = directory.authenticate(KEY_B)
    assert other is not None
    assert other.sharing_group == named_group("team")
    for wrong in ("", KEY_A[:-1], KEY_A + " ", KEY_A.upper(), hash_key(KEY_A), hash_key(KEY_A)[7:], "\udcff"):
        assert directory.authenticate(wrong) is None
    assert directory.num_keys == 3


def test_models_are_allowed_by_name_alone() -> None:
    tenant = Tenant("a", b"a", frozenset({"m"}))
    tenant.check_model("m")
    ANYONE.check_model("whatever")
    with pytest.raises(ApiError) as refused:
        tenant.check_model("M")
    assert (refused.value.status, refused.value.code, refused.value.param) == (403, "forbidden", "model")


@pytest.mark.parametrize(("text", "words"), [
    ("", "no key"), ("[[tenants]]\nid='a'", "no key"), ("x = ", "not TOML"),
    (entry("a", KEY_A) + "\n" + entry("a", KEY_B), "same id"),
    (entry("a", KEY_A) + "\n" + entry("b", KEY_A), "'a' and 'b' have the same key"),
    (entry("a", KEY_A, wieght=1), "wieght"), (entry("a", KEY_A, weight=0), "weight"),
    (entry("a b", KEY_A), "id"), (entry("a", KEY_A, max_concurrent=0), "max_concurrent"),
    (f"[[tenants]]\nid='a'\nkeys=['{KEY_A}']", "in clear"), ("[[tenants]]\nid='a'\nkeys=['sha256:12']", "64 hex"),
    (entry("a\\n", KEY_A), "id"), (entry("a", KEY_A) + "\ntokens_per_minute = inf", "tokens_per_minute"),
    (entry("a", KEY_A) + "\nbudget_tokens = inf", "budget_tokens"),
    (entry("a", KEY_A, max_concurrent=10**20), "max_concurrent"), (entry("a", KEY_A, min_priority=2**31), "priority"),
    (entry("a", KEY_A) + "\n[[public_prefixes]]\nname='p'", "either"),
    (entry("a", KEY_A) + "\n[[public_prefixes]]\nname='p'\ntext=''", "text"),
])
def test_a_wrong_keys_file_is_one_line_without_a_key(text: str, words: str) -> None:
    with pytest.raises(KeysError) as wrong:
        read_keys(text)
    assert words in str(wrong.value)
    assert "\n" not in str(wrong.value)
    assert KEY_A not in str(wrong.value)
    assert hash_key(KEY_A)[7:] not in str(wrong.value)


def test_keys_of_the_environment_join_those_of_the_file() -> None:
    keys = read_keys(entry("a", KEY_A, group="g"), [f"a=new-{KEY_A}", f"c={hash_key(KEY_B)}"]).directory
    assert keys.authenticate(f"new-{KEY_A}") is keys.authenticate(KEY_A)
    found = keys.authenticate(KEY_B)
    assert found is not None
    assert found.sharing_group == own_group("c")
    assert api_keys_problem([]) is None
    for bad in ("no-equals-sign", "a=short", "=" + KEY_A, "a=sha256:zz"):
        problem = api_keys_problem([bad])
        assert problem is not None
        assert bad.partition("=")[2] not in problem or not bad.partition("=")[2]


def test_the_settings_never_show_a_key() -> None:
    environ = {"HEADSTART_API_KEYS": f"a={KEY_A},b={KEY_B}"}
    config = load_settings(GatewayConfig, flags={}, environ=environ, env_prefix="HEADSTART_GATEWAY_")
    assert config.api_keys == (f"a={KEY_A}", f"b={KEY_B}")
    assert KEY_A not in render_settings(config)
    with pytest.raises(SettingsError) as wrong:
        load_settings(GatewayConfig, flags={}, environ={"HEADSTART_API_KEYS": KEY_A}, env_prefix="HEADSTART_GATEWAY_")
    assert KEY_A not in str(wrong.value)


def test_a_password_in_a_workers_url_is_refused_before_anything_shows_it() -> None:
    for url in ("http://user:hidden@h:1", "user:hidden@h:1"):
        with pytest.raises(SettingsError, match="api_key") as wrong:
            load_settings(GatewayConfig, flags={"workers": [url]}, environ={}, env_prefix="HEADSTART_GATEWAY_")
        assert "hidden" not in str(wrong.value)


def test_a_tenant_and_a_directory_print_without_keys(caplog: pytest.LogCaptureFixture) -> None:
    directory = read_keys(entry("a", KEY_A)).directory
    logging.getLogger("t").warning("%r", directory)
    assert hash_key(KEY_A)[7:20] not in caplog.text
    assert repr(bytes.fromhex(hash_key(KEY_A)[7:]))[2:10] not in caplog.text


def test_a_new_key_is_long_and_its_hash_is_what_the_file_wants(capsys: pytest.CaptureFixture[str]) -> None:
    assert new_key.main(["--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert len(made["key"]) > 40
    assert made["hash"] == hash_key(made["key"])
    assert new_key.main(["--tenant", "acme"]) == 0
    out, err = capsys.readouterr()
    key = err.split()[-1]
    assert key not in out
    found = read_keys(out).directory.authenticate(key)
    assert found is not None
    assert found.tenant_id == "acme"


# ---- public texts -----------------------------------------------------------------------------------------------

def chat(system: str, user: str) -> list[int]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return renderer().chat(parse_chat(json.dumps({"model": "m", "messages": messages}).encode()))


def renderer() -> PromptRenderer:
    return PromptRenderer(byte_bundle())


def test_a_public_system_prompt_is_public_up_to_the_question_and_no_further() -> None:
    public = PublicPrefixes([PublicPrefix("p", system="Be kind.")])
    whole = len("<system>Be kind.\n<user>")
    for question in ("a", "0", "What?", "aa"):
        assert public.public_length(renderer(), [chat("Be kind.", question)]) == whole
    assert public.public_length(renderer(), [chat("Be kinder", "a")]) == len("<system>Be kind")
    assert public.public_length(renderer(), [chat("be kind.", "a")]) == len("<system>")


def test_the_longest_public_text_counts_and_of_several_prompts_the_shortest_agreement() -> None:
    public = PublicPrefixes([PublicPrefix("p", text="abc"), PublicPrefix("q", text="abcdef")])
    encode = renderer().tokenizer.encode
    prompts = [encode(text, add_special_tokens=True) for text in ("abcdefg", "abcxyz")]
    assert [public.public_length(renderer(), [prompt]) for prompt in prompts] == [6, 3]
    assert public.public_length(renderer(), prompts) == 3
    assert PublicPrefixes().public_length(renderer(), prompts) == 0


def test_a_template_without_system_prompts_has_no_public_one() -> None:
    prefix = PublicPrefix("p", system="Be kind.")
    assert prefix.token_ids(PromptRenderer(byte_bundle(None))) == []


@pytest.mark.parametrize(("one", "other", "length"), [
    ([], [1], 0), ([1, 2], [1, 2], 2), ([1, 2, 3], [1, 2], 2), ([2], [1], 0), ([1, 2, 3, 9], [1, 2, 4, 9], 2)])
def test_the_common_length(one: list[int], other: list[int], length: int) -> None:
    assert common_length(one, other) == common_length(other, one) == length


@pytest.mark.parametrize("tenant_id", ["", "a b", "a\n", "x" * 65, 'a"'])
def test_no_key_is_made_for_a_tenant_that_no_file_names(tenant_id: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        new_key.main(["--tenant", tenant_id])
    out, err = capsys.readouterr()
    assert out == ""
    assert "hs-" not in err


@pytest.mark.parametrize(("name", "wrong", "right"), [
    ("ROOT_PATH", ("llm", "http://x/llm"), ("", "/llm", "/llm/")),
    ("CORS_ORIGINS", ("app.example", "https://app.example/", "https://App.example", "https://a.example,b.example"),
     ("*", "https://app.example", "http://localhost:3000,chrome-extension://abc")),
])
def test_what_no_proxy_or_browser_would_send_is_a_mistake(name: str, wrong: tuple[str, ...],
                                                          right: tuple[str, ...]) -> None:
    def read(value: str) -> GatewayConfig:
        return load_settings(GatewayConfig, flags={}, environ={f"HEADSTART_GATEWAY_{name}": value},
                             env_prefix="HEADSTART_GATEWAY_")

    for value in right:
        assert getattr(read(value), name.lower()) in (value, tuple(value.split(",")))
    for value in wrong:
        with pytest.raises(SettingsError, match=name):
            read(value)
