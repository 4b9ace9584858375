"""A whole decode step of a compact decoder in one call, on every thread of a team at once.

Every sequence adds one row. What needs whole rows (norms, residuals) each thread does for itself, in numbers that are
the same on all of them; products are shared out by panels, attention by rows and heads, with a barrier after each.
Reads weights and KV by address, and allocates nothing: whoever calls owns every buffer and has checked every size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from worker.model.compiled.kernels import (
    Matrix,
    Seen,
    Weight,
    add_normed,
    add_scaled,
    address_of,
    attend,
    gate_into,
    norm_in_place,
    norm_into,
    panel_of,
    round_into,
    tanh,
    turn,
    weight_product,
)
from worker.model.compiled.machine import (
    PANEL,
    atomic_add,
    atomic_load,
    clear_bytes,
    compiled,
    compiled_and_kept,
    compiled_in_order,
    copy_bytes,
    pause,
    sleep_while,
    wake_all,
)
from worker.model.compiled.team import ARRIVED, IN_VAIN, IN_VAIN_MAX, SLEEPERS, TURN

BEFORE_ATTENTION, AFTER_ATTENTION, BEFORE_MLP, AFTER_MLP = range(4)
OF_QUERY, OF_KEY = range(2)
QKV, ATTENTION_OUT, GATE, UP, DOWN = range(5)


class Decoder(NamedTuple):
    """What never changes. Arrays by layer: `products` and `caches` are addresses (of keys, of values), `norms` is
    [layer, which, hidden] with the final norm behind the last layer's, `head_norms` [layer, of queries or keys, dim],
    of one head or of all, `eps` [layer, 4 norms and 2 of heads], `numbers` scaling, softcap (0: none) and what is
    added is multiplied by."""

    products: np.ndarray
    caches: np.ndarray
    norms: np.ndarray
    head_norms: np.ndarray
    eps: np.ndarray
    biases: np.ndarray
    ropes: np.ndarray
    windows: np.ndarray
    numbers: np.ndarray
    head: int
    head_panels: int
    logits_factor: np.float32
    logits_softcap: np.float32
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int
    activation: int
    norms_heads: bool
    norms_whole: bool
    norms_inputs: bool
    norms_added: bool
    block_size: int
    head_bytes: int
    is_int8: bool


class Rows(NamedTuple):
    """A step's rows: float32 `hidden` [rows, hidden], `positions`, `slots` (-1: K/V are there already), `tables` of
    blocks, cosines and signed sines `turns` [rope, 2, rows, numbers of a head that turn]; `logits` is where the
    result goes."""

    hidden: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    tables: np.ndarray
    turns: np.ndarray
    logits: np.ndarray


class Room(NamedTuple):
    """Buffers. The first are the team's [rows, ...], the last each thread's own [thread, ...]."""

    mixed: np.ndarray
    attended: np.ndarray
    added: np.ndarray
    gated: np.ndarray
    residual: np.ndarray
    normed: np.ndarray
    panels: np.ndarray
    turned: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    sums: np.ndarray


class Team(NamedTuple):
    """`size` threads that call `decode` together, how often one looks for the others before it sleeps, and what they
    tell each other. ThreadTeam makes it, for one step."""

    size: int
    looks: int
    signals: np.ndarray


@compiled_in_order
def wait_for_all(team: Team) -> None:
    """A barrier."""
    if team.size == 1:
        return
    signals = address_of(team.signals)
    turn_now = atomic_load(signals + 4 * TURN)
    if atomic_add(signals + 4 * ARRIVED, np.int32(1)) == team.size - 1:
        atomic_add(signals + 4 * ARRIVED, np.int32(-team.size))
        atomic_add(signals + 4 * TURN, np.int32(1))
        if atomic_load(signals + 4 * SLEEPERS) > 0:
            wake_all(signals + 4 * TURN)
        return
    looks = team.looks if atomic_load(signals + 4 * IN_VAIN) < IN_VAIN_MAX * (team.size - 1) else 0
    while atomic_load(signals + 4 * TURN) == turn_now:
        if looks > 0:
            looks -= 1
            pause()
            if looks == 0:
                atomic_add(signals + 4 * IN_VAIN, np.int32(1))
        else:
            atomic_add(signals + 4 * SLEEPERS, np.int32(1))
            sleep_while(signals + 4 * TURN, turn_now)
            atomic_add(signals + 4 * SLEEPERS, np.int32(-1))


@compiled
def matrix_of(rows: np.ndarray, width: int) -> Matrix:
    return Matrix(address_of(rows), rows.strides[0], width)


@compiled
def share_of(count: int, thread: int, size: int) -> tuple[int, int]:
    return count * thread // size, count * (thread + 1) // size


@compiled
def product_of(x: Matrix, weight: Weight, out: np.ndarray, part: tuple[int, int]) -> None:
    """Panels [part[0], part[1]) of x times the packed `weight`, into float32 `out` [rows, outputs]."""
    whole = matrix_of(out, out.shape[1])
    for panel in range(part[0], part[1]):
        weight_product(x, len(out), panel_of(weight, x.width, panel),
                       Matrix(whole.address + panel * 4 * PANEL, whole.stride, PANEL))


@compiled
def product(x: Matrix, weight: int, out: np.ndarray, part: tuple[int, int]) -> None:
    """The same with a weight of bf16."""
    product_of(x, Weight(weight, False), out, part)


@compiled
def store_keys(decoder: Decoder, rows: Rows, room: Room, at: tuple[int, int, int, int]) -> None:
    """Key and value of one row and KV head, after norm and rope; what is left of a block that begins is cleared."""
    layer, row, head, thread = at
    dim, size = decoder.head_dim, decoder.block_size
    slot = rows.slots[row]
    if slot < 0:
        return
    key = room.mixed[row, (decoder.num_heads + head) * dim:(decoder.num_heads + head + 1) * dim]
    behind = decoder.num_heads + decoder.num_kv_heads + head
    value = room.mixed[row, behind * dim:(behind + 1) * dim]
    if decoder.norms_heads:
        norm_in_place(key, decoder.head_norms[layer, OF_KEY], decoder.eps[layer, 4 + OF_KEY])
    turned = room.turned[thread]
    turns = rows.turns[decoder.ropes[layer]]
    for which in range(2):
        to = decoder.caches[layer, which] + head * decoder.head_bytes + slot * dim * 2
        if slot % size == 0:
            clear_bytes(to, size * dim * 2)
        if which == 0:
            turn(key, turns[0, row], turns[1, row], turned)
        else:
            round_into(value, turned)
        copy_bytes(to, address_of(turned), np.int64(dim * 2))


@compiled
def attend_head(decoder: Decoder, rows: Rows, room: Room, at: tuple[int, int, int, int]) -> None:
    layer, row, head, thread = at
    dim = decoder.head_dim
    query = room.mixed[row, head * dim:(head + 1) * dim]
    if decoder.norms_heads:
        norm_in_place(query, decoder.head_norms[layer, OF_QUERY], decoder.eps[layer, 4 + OF_QUERY])
    turned = room.turned[thread]
    turns = rows.turns[decoder.ropes[layer]]
    turn(query, turns[0, row], turns[1, row], turned)
    window, end = decoder.windows[layer], rows.positions[row] + 1
    begin = max(0, end - window) if window else 0
    offset = head // (decoder.num_heads // decoder.num_kv_heads) * decoder.head_bytes
    seen = Seen(begin, end, rows.tables[row], decoder.caches[layer, 0] + offset, decoder.caches[layer, 1] + offset,
                decoder.block_size, dim, decoder.numbers[layer, 0], decoder.numbers[layer, 1])
    attend(address_of(turned), seen, (room.scores[thread], room.weights[thread], room.sums[thread]),
           room.attended[row, head * dim:(head + 1) * dim])


@compiled
def add_to_residual(decoder: Decoder, room: Room, layer: int, at: tuple[int, int]) -> None:
    """What attention or MLP gave, normed where the family does that; `at` is (which norm, thread)."""
    which, thread = at
    residual, factor = room.residual[thread], decoder.numbers[layer, 2]
    for row in range(len(room.added)):
        if decoder.norms_added:
            add_normed(residual[row], room.added[row], decoder.norms[layer, which],
                       (decoder.eps[layer, which], factor))
        else:
            add_scaled(residual[row], room.added[row], factor)


@compiled
def begin_residual(hidden: np.ndarray, residual: np.ndarray) -> None:
    for row in range(len(hidden)):
        for index in range(hidden.shape[1]):
            residual[row, index] = hidden[row, index]


@compiled
def norm_input(decoder: Decoder, hidden: np.ndarray, normed: np.ndarray, at: tuple[int, int]) -> None:
    """One row as a product reads it; `at` is (layer, which norm), the final one's layer being behind the last."""
    layer, which = at
    if decoder.norms_inputs or layer == len(decoder.products):
        norm_into(hidden, decoder.norms[layer, which], decoder.eps[layer, which], normed)
    else:
        round_into(hidden, normed)


@compiled
def norm_rows(decoder: Decoder, room: Room, layer: int, at: tuple[int, int]) -> None:
    which, thread = at
    for row in range(len(room.added)):
        norm_input(decoder, room.residual[thread, row], room.normed[thread, row], (layer, which))


@compiled
def norm_whole(decoder: Decoder, mixed: np.ndarray, layer: int) -> None:
    """One row's queries, and its keys, each over all heads."""
    begin = 0
    for which in range(2):
        heads = decoder.num_heads if which == OF_QUERY else decoder.num_kv_heads
        end = begin + heads * decoder.head_dim
        norm_in_place(mixed[begin:end], decoder.head_norms[layer, which], decoder.eps[layer, 4 + which])
        begin = end


@compiled
def run_mlp(decoder: Decoder, room: Room, layer: int, at: tuple[int, int]) -> None:
    """Gate, up and activation of this thread's panels; `at` is (thread, team size)."""
    thread, size = at
    normed = matrix_of(room.normed[thread], room.normed.shape[2])
    gate, up = room.panels[thread, 0], room.panels[thread, 1]
    of_gate, of_up = (Weight(decoder.products[layer, GATE], decoder.is_int8),
                      Weight(decoder.products[layer, UP], decoder.is_int8))
    num_panels = (decoder.inner + PANEL - 1) // PANEL
    first, last = share_of(num_panels, thread, size)
    for panel in range(first, last):
        weight_product(normed, len(gate), panel_of(of_gate, normed.width, panel), matrix_of(gate, PANEL))
        weight_product(normed, len(up), panel_of(of_up, normed.width, panel), matrix_of(up, PANEL))
        begin, end = panel * PANEL, min(decoder.inner, (panel + 1) * PANEL)
        for row in range(len(gate)):
            gate_into(gate[row], up[row], decoder.activation, room.gated[row, begin:end])


@compiled
def project(decoder: Decoder, room: Room, at: tuple[int, int, Team]) -> None:
    """Until every row's queries, keys and values are in room.mixed, normed if that is done whole; `at` is (layer,
    thread, team)."""
    layer, thread, team = at
    normed = matrix_of(room.normed[thread], room.normed.shape[2])
    part = share_of(room.mixed.shape[1] // PANEL, thread, team.size)
    product_of(normed, Weight(decoder.products[layer, QKV], decoder.is_int8), room.mixed, part)
    if decoder.biases.shape[0]:
        bias = decoder.biases[layer]
        for row in range(len(room.mixed)):
            for index in range(part[0] * PANEL, part[1] * PANEL):
                room.mixed[row, index] += bias[index]
    wait_for_all(team)
    if decoder.norms_whole:
        first, last = share_of(len(room.mixed), thread, team.size)
        for row in range(first, last):
            norm_whole(decoder, room.mixed[row], layer)
        wait_for_all(team)


@compiled
def run_attention(decoder: Decoder, rows: Rows, room: Room, at: tuple[int, int, Team]) -> None:
    """Until every row's heads are in room.attended; `at` is (layer, thread, team)."""
    layer, thread, team = at
    project(decoder, room, at)
    num_rows = len(rows.positions)
    first, last = share_of(num_rows * decoder.num_kv_heads, thread, team.size)
    for unit in range(first, last):
        store_keys(decoder, rows, room, (layer, unit // decoder.num_kv_heads, unit % decoder.num_kv_heads, thread))
    wait_for_all(team)
    first, last = share_of(num_rows * decoder.num_heads, thread, team.size)
    for unit in range(first, last):
        attend_head(decoder, rows, room, (layer, unit // decoder.num_heads, unit % decoder.num_heads, thread))
    wait_for_all(team)


@compiled
def scale_logits(decoder: Decoder, all_logits: np.ndarray, part: tuple[int, int]) -> None:
    """The family's factor and soft cap, over panels [part[0], part[1])."""
    factor, cap = decoder.logits_factor, decoder.logits_softcap
    if factor == 1 and cap == 0:
        return
    for row in range(len(all_logits)):
        logits = all_logits[row, part[0] * PANEL:part[1] * PANEL]
        for index in range(len(logits)):
            logit = logits[index] * factor
            logits[index] = cap * tanh(logit / cap) if cap > 0 else logit


@compiled
def run_head(decoder: Decoder, rows: Rows, room: Room, at: tuple[int, int]) -> None:
    thread, size = at
    normed = matrix_of(room.normed[thread], room.normed.shape[2])
    part = share_of(decoder.head_panels, thread, size)
    product_of(normed, Weight(decoder.head, decoder.is_int8), rows.logits, part)
    scale_logits(decoder, rows.logits, part)


@compiled_and_kept
def decode(thread: int, team: Team, decoder: Decoder, work: tuple[Rows, Room]) -> None:
    """This thread's part of the step. Returns when rows.logits is there whole."""
    rows, room = work
    begin_residual(rows.hidden, room.residual[thread])
    for layer in range(len(decoder.products)):
        norm_rows(decoder, room, layer, (BEFORE_ATTENTION, thread))
        run_attention(decoder, rows, room, (layer, thread, team))
        attended = matrix_of(room.attended, room.attended.shape[1])
        product_of(attended, Weight(decoder.products[layer, ATTENTION_OUT], decoder.is_int8), room.added,
                   share_of(room.added.shape[1] // PANEL, thread, team.size))
        wait_for_all(team)
        add_to_residual(decoder, room, layer, (AFTER_ATTENTION, thread))
        norm_rows(decoder, room, layer, (BEFORE_MLP, thread))
        run_mlp(decoder, room, layer, (thread, team.size))
        wait_for_all(team)
        product_of(matrix_of(room.gated, room.gated.shape[1]),
                   Weight(decoder.products[layer, DOWN], decoder.is_int8), room.added,
                   share_of(room.added.shape[1] // PANEL, thread, team.size))
        wait_for_all(team)
        add_to_residual(decoder, room, layer, (AFTER_MLP, thread))
    norm_rows(decoder, room, len(decoder.products), (BEFORE_ATTENTION, thread))
    run_head(decoder, rows, room, (thread, team.size))
    wait_for_all(team)
