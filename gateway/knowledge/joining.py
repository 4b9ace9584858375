"""What happens once in each life of a worker before it gets requests: are its tokens ours, and how does it hash?

Owns: the reference of each model (the first worker's tokenizer and template), and the verdict on every later worker.
Must never: write the endpoint table.

The reference stays for as long as any other worker serves with it, or is just joining with it. A worker that joins
when none does becomes the new reference: a model is moved to another template by replacing its workers. Whoever was
judged by a reference that has been replaced, or has been nobody's for REFERENCE_LEFT_S, is judged again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from gateway.knowledge import parity
from gateway.knowledge.endpoint_table import Endpoint, EndpointState, EndpointTable
from gateway.knowledge.engines.headstart import HeadstartWorker, WorkerReport
from gateway.knowledge.parity import ParityReport
from worker.prompt.renderer import PromptRenderer
from worker.prompt.requests import TokenizeRequest
from worker.prompt.token_bound import TokenBound, token_bound
from worker.prompt.tokenizer import TokenizerBundle
from worker.protocol.api_error import ApiError
from worker.protocol.block_hash import HashScheme

REFERENCE_LEFT_S = 5.0      # longer than a worker's bad moment: another template should not take over for that


@dataclass(frozen=True, slots=True)
class ModelReference:
    """How this gateway renders and tokenises for a model, and whose files it does that with."""

    model: str
    endpoint_id: str
    renderer: PromptRenderer
    token_bound: TokenBound | None = None

    @property
    def bundle(self) -> TokenizerBundle:
        """Tokenizer, template and special tokens."""
        return self.renderer.bundle

    def agrees_with(self, bundle: TokenizerBundle) -> bool:
        """Whether these files give the same tokens for every request."""
        ours = self.bundle
        return (ours.tokenizer_digest, ours.template_digest) == (bundle.tokenizer_digest, bundle.template_digest)


@dataclass(frozen=True, slots=True)
class Joined:
    """The verdict on one life of a worker. `scheme` is None when its hashes cannot be computed here."""

    epoch: str
    scheme: HashScheme | None
    compatible: bool
    parity: ParityReport
    detail: str


class Joining:
    """References by model; at most as many as there are workers."""

    def __init__(self, table: EndpointTable, text_memory_bytes: int) -> None:
        self._table = table
        self._make_renderer = partial(PromptRenderer, memory_bytes=text_memory_bytes)
        self._references: dict[str, ModelReference] = {}
        self._adherents: dict[str, str] = {}  # worker -> model whose reference it agreed with, since it last was away
        self._judged_by: dict[str, ModelReference] = {}
        self._unheld_at: dict[str, float] = {}  # model -> since when nobody has been seen to serve with its reference

    def forget(self, endpoint_id: str) -> None:
        """There is no such worker any more."""
        self.left(endpoint_id)
        self._judged_by.pop(endpoint_id, None)

    def must_judge_again(self, endpoint: Endpoint, now: float) -> bool:
        """Whether the verdict on this life of a worker may be another one by now. Asked at every look at it."""
        judged_by, model = self._judged_by.get(endpoint.endpoint_id), endpoint.model
        if judged_by is None or model is None:
            return False
        if self._references.get(model) is not judged_by:
            return True
        if endpoint.compatible or self._is_held_by_others(model, endpoint.endpoint_id):
            self._unheld_at.pop(model, None)
            return False
        return now - self._unheld_at.setdefault(model, now) >= REFERENCE_LEFT_S

    def left(self, endpoint_id: str) -> None:
        """This worker is gone or not ready: it holds no reference in place any more (until it serves again)."""
        self._adherents.pop(endpoint_id, None)

    def reference(self, model: str) -> ModelReference | None:
        """How to tokenise for this model, or for an adapter's; None before its first worker joined."""
        found = self._references.get(model)
        return found if found is not None else self._references.get(self._table.model_behind(model))

    def references(self) -> dict[str, ModelReference]:
        """Every model's."""
        return dict(self._references)

    async def join(self, worker: HeadstartWorker, report: WorkerReport) -> Joined:
        """Fetch its files, compare, probe. Raises what HeadstartWorker raises."""
        self.left(worker.worker.endpoint_id)  # whatever its former life agreed with
        known = self.reference(report.model)
        bundle = await worker.tokenizer(known.bundle if known is not None else None)
        reference = await self._settle_reference(worker.worker.endpoint_id, report.model, bundle)
        self._judged_by[worker.worker.endpoint_id] = reference
        self._unheld_at.pop(report.model, None)
        probe = await self._probe(worker, reference)
        same_files = reference.agrees_with(bundle)
        scheme, detail = _read_scheme(report)
        if not same_files:
            detail = f"its tokenizer or chat template is not the one of {reference.endpoint_id}"
        elif not probe.ok:
            detail = f"it tokenises differently from the gateway at position {probe.position}"
        return Joined(report.epoch, scheme, same_files and probe.ok, probe, detail)

    async def _settle_reference(self, endpoint_id: str, model: str, bundle: TokenizerBundle) -> ModelReference:
        current = self._references.get(model)
        if current is None or not (current.agrees_with(bundle) or self._is_held_by_others(model, endpoint_id)):
            renderer = await asyncio.to_thread(self._make_renderer, bundle)
            bound = await asyncio.to_thread(token_bound, bundle.tokenizer_json)
            if self._references.get(model) is current:  # nobody else became it while the tokenizer was loading
                self._references[model] = ModelReference(model, endpoint_id, renderer, bound)
            current = self._references[model]
        if current.agrees_with(bundle):
            self._adherents[endpoint_id] = model
        return current

    def _is_held_by_others(self, model: str, endpoint_id: str) -> bool:
        """Adherents may not be in the table yet; those that came back from a bad moment are there alone."""
        serving = (EndpointState.READY, EndpointState.DRAINING)
        others = [other for other in self._table if other.endpoint_id != endpoint_id]
        return any(self._adherents.get(other.endpoint_id) == model for other in others) or any(
            other.model == model and other.compatible and other.state in serving for other in others)

    async def _probe(self, worker: HeadstartWorker, reference: ModelReference) -> ParityReport:
        try:
            request = _chat_probe(reference.model)
            ours = await asyncio.to_thread(reference.renderer.tokenize, request)
        except ApiError:  # no template, or one that refuses the conversation: compare the tokenizers alone
            request = _text_probe(reference.model)
            ours = await asyncio.to_thread(reference.renderer.tokenize, request)
        return parity.compare(ours, await worker.tokenize(request))


def _chat_probe(model: str) -> TokenizeRequest:
    return TokenizeRequest(model=model, prompt=None, messages=parity.PROBE_MESSAGES, add_special_tokens=False)


def _text_probe(model: str) -> TokenizeRequest:
    text = "\n".join(message["content"] for message in parity.PROBE_MESSAGES)
    return TokenizeRequest(model=model, prompt=text, messages=None, add_special_tokens=True)


def _read_scheme(report: WorkerReport) -> tuple[HashScheme | None, str]:
    try:
        scheme = HashScheme.from_wire(report.hash_scheme)
    except ValueError as error:
        return None, str(error)
    if scheme.digest() != report.hash_scheme_digest:
        return None, "its hash scheme's digest is not the one computed here: run worker and gateway of one version"
    return scheme, ""
