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
