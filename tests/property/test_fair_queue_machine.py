"""The fair queue against a naive model of lists, and what fairness promises."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from gateway.admission.queue import FLOWS_LOOK_AT, FairQueue, Waiting

AGEING_S = 10.0
MAX_REQUESTS, MAX_BYTES = 6, 100
CATCH_UP_TOKENS = 32
HEAD_START_TOKENS = 8
TENANTS = {"a": 1.0, "b": 2.0, "c": 0.5}


@dataclass
class NaiveQueue:
    """One list of everything in the order of arrival, and a virtual start for each tenant."""

    catch_up_tokens: int = CATCH_UP_TOKENS
    line: list[Waiting] = field(default_factory=list)
    starts: dict[str, float] = field(default_factory=dict)
    now: float = 0.0

    def comes(self, tenant_id: str) -> None:
        if not self.of(tenant_id):
            earliest = max(0.0, self.now - self.catch_up_tokens)
            self.starts[tenant_id] = max(self.starts.get(tenant_id, earliest), earliest)

    def serve(self, entry: Waiting) -> None:
        self.now = max(self.now, self.starts[entry.tenant_id])
        self.starts[entry.tenant_id] += entry.cost_tokens / TENANTS[entry.tenant_id]

    def pass_by(self, entry: Waiting) -> None:
        if self.line:
            self.comes(entry.tenant_id)
            self.serve(entry)
        else:
            self.starts, self.now = {}, 0.0

    def rank(self, entry: Waiting) -> tuple[float, int]:
        at = self.line.index(entry) if entry in self.line else len(self.line)
        return entry.priority * AGEING_S + entry.arrived_at, at

    def of(self, tenant_id: str) -> list[Waiting]:
        return sorted((entry for entry in self.line if entry.tenant_id == tenant_id), key=self.rank)

    def burden(self, tenant_id: str) -> float:
        return sum(one.cost_tokens for one in self.of(tenant_id)) / TENANTS[tenant_id]

    def offer(self, entry: Waiting) -> list[Waiting] | None:
        line = [*self.line, entry]
        victims = []
        while len(line) > MAX_REQUESTS or sum(one.num_bytes for one in line) > MAX_BYTES:
            burden = {tenant: sum(one.cost_tokens for one in line if one.tenant_id == tenant) / weight
                      for tenant, weight in TENANTS.items() if any(one.tenant_id == tenant for one in line)}
            heaviest = max(burden, key=lambda name: (burden[name], name == entry.tenant_id, name))
            victim = max((one for one in line if one.tenant_id == heaviest), key=self.rank)
            if victim is entry:
                return None
            line.remove(victim)
            victims.append(victim)
        for victim in victims:
            self.line.remove(victim)
        self.comes(entry.tenant_id)
        self.line.append(entry)
        return victims

    def take(self, may_go: frozenset[str]) -> Waiting | None:
        waiting = {entry.tenant_id for entry in self.line} & may_go
        if not waiting:
            return None
        latest = min(self.starts[name] for name in waiting) + HEAD_START_TOKENS
        level = [name for name in waiting if self.starts[name] <= latest]
        entry = self.of(min(level, key=lambda name: (self.burden(name), self.starts[name], name)))[0]
        self.line.remove(entry)
        self.serve(entry)
        return entry


class FairQueueMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(max_requests=MAX_REQUESTS, max_bytes=MAX_BYTES, ageing_s=AGEING_S,
                               catch_up_tokens=CATCH_UP_TOKENS, head_start_tokens=HEAD_START_TOKENS)
        self.naive = NaiveQueue()
        self.clock = 0.0

    # Costs are powers of two and weights too, so that no sum rounds differently on the two sides.
    @rule(tenant=st.sampled_from(sorted(TENANTS)), cost=st.sampled_from([1, 2, 4, 64]),
          num_bytes=st.sampled_from([0, 1, 30, 60, 101]), priority=st.integers(-2, 2),
          later=st.sampled_from([0.0, 1.0, 25.0]), patience=st.sampled_from([None, 0.5, 30.0]))
    def offer(self, tenant: str, cost: int, num_bytes: int, priority: int, later: float,
              patience: float | None) -> None:
        self.clock += later
        entry = Waiting(tenant, cost, num_bytes, self.clock, TENANTS[tenant], priority,
                        None if patience is None else self.clock + patience)
        hopeless = self.queue.is_hopeless(structs.replace(entry, cost_tokens=0))
        expected = self.naive.offer(entry)
        assert self.queue.offer(entry) == expected
        assert entry.queued == (expected is not None)
        assert not (hopeless and entry.queued), "what is refused before its tokens are counted has no room after"

    @rule(may_go=st.frozensets(st.sampled_from(sorted(TENANTS)), min_size=1))
    def take(self, may_go: frozenset[str]) -> None:
        expected = self.naive.take(may_go)
        entry = self.queue.take(may_go.__contains__)
        assert entry is expected
        assert entry is None or not entry.queued

    @rule(tenant=st.sampled_from(sorted(TENANTS)), cost=st.sampled_from([1, 4, 64]))
    def pass_by(self, tenant: str, cost: int) -> None:
        entry = Waiting(tenant, cost, 0, self.clock, TENANTS[tenant])
        self.naive.pass_by(entry)
        self.queue.pass_by(entry)

    @precondition(lambda self: self.naive.line)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.naive.line))
        self.naive.line.remove(entry)
        assert self.queue.remove(entry)
        assert not self.queue.remove(entry), "leaving twice is harmless"

    @rule(later=st.sampled_from([0.0, 1.0, 40.0]))
    def expire(self, later: float) -> None:
        self.clock += later
        late = [entry for entry in self.naive.line
                if entry.deadline_at is not None and entry.deadline_at <= self.clock]
        self.naive.line = [entry for entry in self.naive.line if entry not in late]
        assert sorted(map(id, self.queue.expired(self.clock))) == sorted(map(id, late))

    @invariant()
    def counts_agree(self) -> None:
        self.queue.check_invariants()
        assert len(self.queue) == len(self.naive.line)
        for tenant, weight in TENANTS.items():
            own = sum(entry.cost_tokens for entry in self.naive.of(tenant))
            everything = sum(entry.cost_tokens for entry in self.naive.line)
            assert own <= self.queue.tokens_before(tenant, weight) <= everything
            assert self.queue.waits(tenant) == bool(self.naive.of(tenant))


TestFairQueue = FairQueueMachine.TestCase
TestFairQueue.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


COSTS = st.lists(st.integers(1, 500), min_size=60, max_size=60)


@settings(max_examples=50)
@given(COSTS, COSTS, st.sampled_from([0.25, 1.0, 3.0]), st.sampled_from([0, 2000]))
def test_two_tenants_that_always_wait_get_tokens_by_weight(one: list[int], other: list[int], weight: float,
                                                           head_start_tokens: int) -> None:
    """At any moment their tokens, divided by weight, differ by no more than one request of each and a head start."""
    queue = FairQueue(max_requests=1000, max_bytes=1000, ageing_s=AGEING_S, head_start_tokens=head_start_tokens)
    for at, (cost_one, cost_other) in enumerate(zip(one, other, strict=True)):
        queue.offer(Waiting("one", cost_one, 0, float(at), weight))
        queue.offer(Waiting("other", cost_other, 0, float(at), 1.0))
    bound = 500 / weight + 500 + head_start_tokens
    served = {"one": 0.0, "other": 0.0}
    left = {"one": len(one), "other": len(other)}
    while min(left.values()):
        entry = queue.take()
        assert entry is not None
        served[entry.tenant_id] += entry.cost_tokens / entry.weight
        left[entry.tenant_id] -= 1
        assert abs(served["one"] - served["other"]) <= bound


@settings(max_examples=50)
@given(COSTS, st.integers(0, 4000))
def test_of_those_who_are_level_the_one_with_less_in_line_goes_first_for_its_head_start(
        costs: list[int], head_start_tokens: int) -> None:
    queue = FairQueue(max_requests=200, max_bytes=100, ageing_s=AGEING_S, head_start_tokens=head_start_tokens)
    for at in range(100):
        queue.offer(Waiting("flood", 500, 0, float(at)))
    for at, cost in enumerate(costs):
        queue.offer(Waiting("quiet", cost, 0, 100.0 + at))
    ahead = 0.0
    while queue.waits("quiet"):
        entry = queue.take()
        assert entry is not None
        assert (entry.tenant_id == "quiet") == (ahead <= head_start_tokens)
        ahead += entry.cost_tokens if entry.tenant_id == "quiet" else -entry.cost_tokens


def test_waiting_makes_up_for_a_low_priority() -> None:
    queue = FairQueue(max_requests=10, max_bytes=10, ageing_s=AGEING_S)
    patient = Waiting("a", 1, 0, arrived_at=0.0, priority=3)
    early = Waiting("a", 1, 0, arrived_at=29.0, priority=0)
    late = Waiting("a", 1, 0, arrived_at=31.0, priority=0)
    for entry in (late, patient, early):
        assert queue.offer(entry) == []
    assert [queue.take() for _ in range(3)] == [early, patient, late]


def test_without_catching_up_a_tenant_that_was_away_has_saved_nothing_up_and_owes_nothing() -> None:
    queue = FairQueue(max_requests=100, max_bytes=100, ageing_s=AGEING_S)
    for at in range(20):
        queue.offer(Waiting("busy", 100, 0, float(at)))
    for _ in range(10):
        queue.take()
    for at in range(4):
        queue.offer(Waiting("back", 100, 0, 50.0 + at))
    order = [entry.tenant_id for entry in (queue.take() for _ in range(8)) if entry is not None]
    assert order.count("back") == 4, "it gets its half, and no more"
    assert order[:3].count("back") <= 2, "one request ahead of the others at the most"


@settings(max_examples=50)
@given(COSTS, st.integers(0, 4000))
def test_a_tenant_that_was_away_goes_first_for_what_it_may_catch_up_and_then_in_turn(costs: list[int],
                                                                                   catch_up_tokens: int) -> None:
    queue = FairQueue(max_requests=100, max_bytes=100, ageing_s=AGEING_S, catch_up_tokens=catch_up_tokens)
    for at in range(40):
        queue.offer(Waiting("busy", 500, 0, float(at)))
    for _ in range(20):
        queue.take()
    assert catch_up_tokens < 20 * 500, "no more than the busy one has had"
    for at, cost in enumerate(costs):
        queue.offer(Waiting("back", cost, 0, 50.0 + at))
    ahead = 0.0
    while queue.waits("back") and queue.waits("busy"):
        entry = queue.take()
        assert entry is not None
        ahead += entry.cost_tokens if entry.tenant_id == "back" else -entry.cost_tokens
        # The busy one is a request ahead of the present when the other comes, and the other may end one further.
        assert ahead <= catch_up_tokens + 1000
        assert entry.tenant_id == "back" or ahead >= catch_up_tokens, "nobody else before it has caught up"


def test_tenants_that_are_level_with_the_others_are_forgotten() -> None:
    queue = FairQueue(max_requests=10, max_bytes=10, ageing_s=AGEING_S, catch_up_tokens=100)
    queue.offer(Waiting("waits", 1, 0, 0.0))
    for number in range(5000):
        queue.pass_by(Waiting("busy", 10, 0, 0.0))
        queue.pass_by(Waiting(f"once-{number}", 10, 0, 0.0))
        assert len(queue._flows) <= 2 * FLOWS_LOOK_AT
