"""A whole step of many rows in one call, on every thread of a team at once: prompts, and what decodes beside them.

Rows are shared out, so that between two barriers a thread takes its rows through everything from one layer's
attention to the next one's. Only attention looks at other threads' rows; it is shared out tile by tile, to whoever is
free. Allocates nothing: whoever calls owns every buffer and has checked every size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from worker.model.compiled.kernels import (
    add_normed,
    add_scaled,
    address_of,
    gate_into,
    norm_in_place,
    panel_product,
    round_into,
    turn,
)
from worker.model.compiled.machine import PANEL, atomic_add, clear_bytes, compiled, compiled_and_kept, copy_bytes
from worker.model.compiled.packing import Blocks
from worker.model.compiled.prompt_attention import Scratch, Tile, attend_tile
from worker.model.compiled.step import (
    AFTER_ATTENTION,
    AFTER_MLP,
    ATTENTION_OUT,
    BEFORE_ATTENTION,
    BEFORE_MLP,
    DOWN,
    GATE,
    OF_KEY,
    OF_QUERY,
    QKV,
    UP,
    Decoder,
    Team,
    matrix_of,
    norm_input,
    norm_whole,
    product,
    scale_logits,
    share_of,
    wait_for_all,
)

ROWS_MAX = 96       # a thread takes so many rows at a time through a layer


class Prompts(NamedTuple):
    """A step's rows, packed end to end: float32 `hidden` [rows, hidden], overwritten; `positions`; `slots` (-1: K/V
    are there already); how many slots `behind` are cleared with a row's; cosines and sines `turns`
    [rope, 2, rows, numbers of a head that turn]. `tiles` of attention are (sequence, first row, rows), `tables` the
    sequences' blocks. `taken` counts each layer's tiles, from 0. `wanted` are the rows whose `logits` are, [wanted
    rows, outputs]."""

    hidden: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    behind: np.ndarray
    turns: np.ndarray
    tiles: np.ndarray
    tables: np.ndarray
    taken: np.ndarray
    wanted: np.ndarray
    logits: np.ndarray


class PromptRoom(NamedTuple):
    """Buffers. The first are the team's [rows, ...], the last each thread's own [thread, ...]."""

    queries: np.ndarray
    attended: np.ndarray
    last_hidden: np.ndarray
    last_attended: np.ndarray
    last_normed: np.ndarray
    normed: np.ndarray
    mixed: np.ndarray
    added: np.ndarray
    gated: np.ndarray
    panels: np.ndarray
    turned: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    sums: np.ndarray
    summands: np.ndarray
    seen: np.ndarray


@compiled
def store_row(decoder: Decoder, prompts: Prompts, given: tuple[np.ndarray, np.ndarray], at: tuple[int, int]) -> None:
    """Keys and values of one row; `given` are its queries, keys and values, and room for a head; `at` is (layer,
    row)."""
    mixed, turned = given
    layer, row = at
    dim, slot, heads = decoder.head_dim, prompts.slots[row], decoder.num_heads
    if slot < 0:
        return
    turns = prompts.turns[decoder.ropes[layer]]
    for head in range(decoder.num_kv_heads):
        key = mixed[(heads + head) * dim:(heads + head + 1) * dim]
        value = mixed[(heads + decoder.num_kv_heads + head) * dim:(heads + decoder.num_kv_heads + head + 1) * dim]
        if decoder.norms_heads:
            norm_in_place(key, decoder.head_norms[layer, OF_KEY], decoder.eps[layer, 4 + OF_KEY])
        for which in range(2):
            if which == 0:
                turn(key, turns[0, row], turns[1, row], turned)
            else:
                round_into(value, turned)
            to = decoder.caches[layer, which] + head * decoder.head_bytes + slot * dim * 2
            copy_bytes(to, address_of(turned), np.int64(dim * 2))
            if prompts.behind[row] > 0:
                clear_bytes(to + dim * 2, prompts.behind[row] * dim * 2)


@compiled
def project(decoder: Decoder, prompts: Prompts, room: PromptRoom, at: tuple[int, int, int, int]) -> None:
    """Queries, and keys and values into their blocks; `at` is (layer, thread, first row, last row)."""
    layer, thread, begin, end = at
    normed, mixed, dim = room.normed[thread, :end - begin], room.mixed[thread, :end - begin], decoder.head_dim
    for row in range(begin, end):
        norm_input(decoder, prompts.hidden[row], normed[row - begin], (layer, BEFORE_ATTENTION))
    product(matrix_of(normed, normed.shape[1]), decoder.products[layer, QKV], mixed, (0, mixed.shape[1] // PANEL))
    turns = prompts.turns[decoder.ropes[layer]]
    for row in range(begin, end):
        of_row = mixed[row - begin]
        if decoder.biases.shape[0]:
            bias = decoder.biases[layer]
            for index in range(len(of_row)):
                of_row[index] += bias[index]
        if decoder.norms_whole:
            norm_whole(decoder, of_row, layer)
        store_row(decoder, prompts, (of_row, room.turned[thread]), (layer, row))
        for head in range(decoder.num_heads):
            query = of_row[head * dim:(head + 1) * dim]
            if decoder.norms_heads:
                norm_in_place(query, decoder.head_norms[layer, OF_QUERY], decoder.eps[layer, 4 + OF_QUERY])
            turn(query, turns[0, row], turns[1, row], room.queries[row, head * dim:(head + 1) * dim])


@compiled
def attend_all(decoder: Decoder, prompts: Prompts, room: PromptRoom, at: tuple[int, int]) -> None:
    """Tiles of attention, one after the other, until all are taken; `at` is (layer, thread)."""
    layer, thread = at
    kv_heads, dim = decoder.num_kv_heads, decoder.head_dim
    group = decoder.num_heads // kv_heads
    scratch = Scratch(room.keys[thread], room.values[thread], room.scores[thread], room.weights[thread],
                      room.sums[thread], room.summands[thread], room.seen[thread])
    count = len(prompts.tiles) * kv_heads
    taken = address_of(prompts.taken) + 4 * layer
    unit = atomic_add(taken, np.int32(1))
    while unit < count:
        which, head = unit // kv_heads, unit % kv_heads
        first, rows = prompts.tiles[which, 1], prompts.tiles[which, 2]
        offset = head * decoder.head_bytes
        width = group * dim
        queries = address_of(room.queries) + first * room.queries.strides[0] + head * width * 2
        tile = Tile(prompts.positions[first], rows, group, queries, room.queries.strides[0], decoder.windows[layer],
                    decoder.numbers[layer, 0], decoder.numbers[layer, 1])
        blocks = Blocks(prompts.tables[prompts.tiles[which, 0]], decoder.caches[layer, 0] + offset,
                        decoder.caches[layer, 1] + offset, decoder.block_size, dim)
        attend_tile(tile, blocks, scratch, room.attended[first:first + rows, head * width:(head + 1) * width])
        unit = atomic_add(taken, np.int32(1))


@compiled
def add_product(decoder: Decoder, hidden: np.ndarray, added: np.ndarray, at: tuple[int, int]) -> None:
    """What attention or MLP gave, normed where the family does that; `at` is (layer, which norm)."""
    layer, which = at
    factor = decoder.numbers[layer, 2]
    for row in range(len(hidden)):
        if decoder.norms_added:
            add_normed(hidden[row], added[row], decoder.norms[layer, which], (decoder.eps[layer, which], factor))
        else:
            add_scaled(hidden[row], added[row], factor)


@compiled
def run_mlp(decoder: Decoder, normed: np.ndarray, room: PromptRoom, at: tuple[int, int]) -> None:
    """Gate, up and activation; `at` is (layer, thread)."""
    layer, thread = at
    x, count = matrix_of(normed, normed.shape[1]), len(normed)
    gate, up, gated = room.panels[thread, 0], room.panels[thread, 1], room.gated[thread]
    panel_bytes = x.width * 2 * PANEL
    for panel in range((decoder.inner + PANEL - 1) // PANEL):
        panel_product(x, count, decoder.products[layer, GATE] + panel * panel_bytes, matrix_of(gate, PANEL))
        panel_product(x, count, decoder.products[layer, UP] + panel * panel_bytes, matrix_of(up, PANEL))
        begin, end = panel * PANEL, min(decoder.inner, (panel + 1) * PANEL)
        for row in range(count):
            gate_into(gate[row], up[row], decoder.activation, gated[row, begin:end])


@compiled
def finish_layer(decoder: Decoder, rows: tuple[np.ndarray, np.ndarray], room: PromptRoom,
                 at: tuple[int, int]) -> None:
    """The layer after its attention, of `rows` (hidden, attended); `at` is (layer, thread)."""
    layer, thread = at
    hidden, attended = rows
    count = len(hidden)
    normed, added = room.normed[thread, :count], room.added[thread, :count]
    everything = (0, added.shape[1] // PANEL)
    product(matrix_of(attended, attended.shape[1]), decoder.products[layer, ATTENTION_OUT], added, everything)
    add_product(decoder, hidden, added, (layer, AFTER_ATTENTION))
    for row in range(count):
        norm_input(decoder, hidden[row], normed[row], (layer, BEFORE_MLP))
    run_mlp(decoder, normed, room, (layer, thread))
    gated = room.gated[thread]
    product(matrix_of(gated, gated.shape[1]), decoder.products[layer, DOWN], added, everything)
    add_product(decoder, hidden, added, (layer, AFTER_MLP))


@compiled
def copy_row(row: np.ndarray, to: np.ndarray) -> None:
    for index in range(len(row)):
        to[index] = row[index]


@compiled
def finish_last(decoder: Decoder, prompts: Prompts, room: PromptRoom, at: tuple[int, int]) -> None:
    """The last layer after its attention and the final norm, of this thread's share of the wanted rows."""
    thread, size = at
    layer = len(decoder.products) - 1
    first, last = share_of(len(prompts.wanted), thread, size)
    for index in range(first, last):
        copy_row(prompts.hidden[prompts.wanted[index]], room.last_hidden[index])
        copy_row(room.attended[prompts.wanted[index]], room.last_attended[index])
    for begin in range(first, last, ROWS_MAX):
        end = min(last, begin + ROWS_MAX)
        finish_layer(decoder, (room.last_hidden[begin:end], room.last_attended[begin:end]), room, (layer, thread))
    for index in range(first, last):
        norm_input(decoder, room.last_hidden[index], room.last_normed[index], (layer + 1, BEFORE_ATTENTION))


@compiled
def run_head(decoder: Decoder, prompts: Prompts, room: PromptRoom, part: tuple[int, int]) -> None:
    """The wanted rows' logits in this thread's panels of the head."""
    normed = room.last_normed[:len(prompts.wanted)]
    product(matrix_of(normed, normed.shape[1]), decoder.head, prompts.logits, part)
    scale_logits(decoder, prompts.logits, part)


@compiled_and_kept
def compute(thread: int, team: Team, decoder: Decoder, work: tuple[Prompts, PromptRoom]) -> None:
    """This thread's part of the step. Returns when prompts.logits is there whole."""
    prompts, room = work
    layers, num_rows = len(decoder.products), len(prompts.positions)
    parts = (num_rows + ROWS_MAX * team.size - 1) // (ROWS_MAX * team.size)
    for layer in range(layers):
        for part in range(parts):
            begin, end = share_of(num_rows, thread * parts + part, parts * team.size)
            if layer > 0 and begin < end:
                finish_layer(decoder, (prompts.hidden[begin:end], room.attended[begin:end]), room,
                             (layer - 1, thread))
            if begin < end:
                project(decoder, prompts, room, (layer, thread, begin, end))
        wait_for_all(team)
        attend_all(decoder, prompts, room, (layer, thread))
        wait_for_all(team)
    if len(prompts.wanted) == 0:
        return
    finish_last(decoder, prompts, room, (thread, team.size))
    wait_for_all(team)
    run_head(decoder, prompts, room, share_of(decoder.head_panels, thread, team.size))
    wait_for_all(team)
