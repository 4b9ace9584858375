"""/admin/explain and what it foresees."""

from __future__ import annotations

import json

from tests.support.gateway_in_process import ADMIN, WORKER_TOKEN, running_gateway
from tests.support.stub_worker import StubWorker, running


async def test_explain_says_what_a_worker_would_refuse() -> None:
    stub = StubWorker(worker_token=WORKER_TOKEN, max_context=512)
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()

        async def explained(**more: object) -> dict[str, object]:
            answer = await gateway.send("POST", "/admin/explain", headers=ADMIN,
                                        payload={"model": "stub", "prompt": list(range(1, 101)), **more})
            assert answer.status == 200
            assert json.loads(answer.body)["decision"]["endpoint_id"]
            return json.loads(answer.body)["would_be_refused"]  # type: ignore[no-any-return]

        for fits in ({}, {"max_tokens": 412}):
            assert await explained(**fits) is None
        refusal = await explained(max_tokens=413)
        assert (refusal["param"], refusal["code"]) == ("max_tokens", "invalid_request")
        assert "413" in str(refusal["message"])
        assert "leaves 412" in str(refusal["message"])


async def test_explain_reads_each_body_as_its_own_api_does() -> None:
    """As many tokens as the same conversation has as a chat, instructions included."""
    stub = StubWorker(worker_token=WORKER_TOKEN, max_context=4096)
    said = {"role": "user", "content": "Which way is the harbour?"}
    chat = [{"role": "system", "content": "Be brief. " * 30}, said]
    async with running(stub), running_gateway(stub.url) as gateway:
        await gateway.until_exact()
        tokens = []
        for body in ({"messages": chat}, {"system": chat[0]["content"], "messages": [said], "max_tokens": 5},
                     {"instructions": chat[0]["content"], "input": [said]}):
            answer = await gateway.send("POST", "/admin/explain", headers=ADMIN, payload={"model": "stub", **body})
            assert answer.status == 200, answer.body
            tokens.append(json.loads(answer.body)["prompt_tokens"])
        assert tokens[0] == tokens[1] == tokens[2] > 30
