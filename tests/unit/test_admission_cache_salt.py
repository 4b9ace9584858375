"""Salts: keyed by the deployment's secret, apart by group, narrowed by the body, and told to every kind of worker."""

from __future__ import annotations

import itertools
import json

import pytest

from gateway.admission.cache_salt import NO_SALT, CacheSalt, cache_salt_of, with_cache_salt
from gateway.admission.tenants import named_group, own_group
from worker.protocol.api_error import ApiError
from worker.protocol.block_hash import ExtraKeyKind


def test_one_tenant_salts_only_what_asks_for_it() -> None:
    assert cache_salt_of(None, "secret") is NO_SALT
    salt = cache_salt_of("s", "secret")
    assert salt.internal is not None
    assert len(salt.internal) == 32
    assert salt.in_body is None
    assert [(key.kind, key.value) for key in salt.extra_keys] == [(ExtraKeyKind.GATEWAY_SALT, salt.internal)]


def test_without_a_secret_the_worker_salts_and_we_only_predict_it() -> None:
    salt = cache_salt_of("grüße", "")
    assert salt.internal is None
    assert [(key.kind, key.value) for key in salt.extra_keys] == [(ExtraKeyKind.BODY_SALT, "grüße".encode())]


def test_every_group_body_and_secret_has_a_salt_of_its_own() -> None:
    groups = (b"", own_group("a"), own_group("b"), named_group("a"), own_group("ab"))
    salts = [cache_salt_of(body, secret, sharing_group=group).internal
             for group, body, secret in itertools.product(groups, (None, "", "a", "ba"), ("s", "t"))]
    given = [salt for salt in salts if salt is not None]
    assert len(given) == len(salts) - 2, "only the one tenant without a body salt has none"
    assert len(set(given)) == len(given)


def test_public_tokens_come_before_the_salt() -> None:
    salt = cache_salt_of(None, "secret", sharing_group=own_group("a"), salt_from=100)
    assert salt.salt_from == 100
    assert salt.extra_keys[0].start == 100


def test_workers_that_read_the_body_find_the_tenants_salt_in_it_from_the_first_block() -> None:
    salt = cache_salt_of("mine", "secret", sharing_group=own_group("a"), is_internal=False, salt_from=100)
    assert salt.internal is None
    assert salt.in_body is not None
    assert salt.extra_keys[0] == (ExtraKeyKind.BODY_SALT, salt.in_body.encode(), 0)


def test_a_body_salt_is_replaced_not_added() -> None:
    body = b'{"cache_salt":"theirs","n":123456789012345678901234567890,"s":"\\ud800","f":1e-7,"model":"m"}'
    salted = with_cache_salt(body, "ours")
    assert salted.count(b"cache_salt") == 1
    assert json.loads(salted) == {**json.loads(body), "cache_salt": "ours"}


@pytest.mark.parametrize("number", ["1" * 5000, "1e999"])
def test_a_number_that_cannot_be_written_anew_is_the_clients_mistake(number: str) -> None:
    with pytest.raises(ApiError) as refused:
        with_cache_salt(b'{"x":' + number.encode() + b"}", "ours")
    assert refused.value.status == 400


def test_a_salt_is_a_value() -> None:
    assert cache_salt_of("s", "k") == cache_salt_of("s", "k")
    assert isinstance(NO_SALT, CacheSalt)
