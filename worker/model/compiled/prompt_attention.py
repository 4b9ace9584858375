"""Attention of many rows of one sequence in compiled code: chunk by chunk of keys, in products over panels.

A tile is some rows of one sequence with all heads that share a KV head. What rows see is summed as it comes, against
the largest score so far, so that buffers are as large for any context.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from worker.model.compiled.kernels import _ROUND, Matrix, address_of, panel_product, sum_of, tanh
from worker.model.compiled.machine import (
    _F32,
    _FLOATS,
    _I32,
    _I64,
    _INTS,
    LANES,
    PANEL,
    _load,
    _loop,
    _outlined,
    _store,
    bits_of_float,
    compiled,
    compiled_in_order,
    float_of_bits,
    to_bf16,
)
from worker.model.compiled.packing import CHUNK, PAIR_BYTES, Blocks, pack

FOLDED_ROWS = 192       # a tile's rows times heads, about: what fits into a core's cache with a chunk
TILE_ROWS_MAX = 96
_LOG2_E = np.float32(1.4426950409)
_LOWEST = np.float32(-126.0)


class Tile(NamedTuple):
    """`rows` rows at positions from `start` on, `group` heads of each. Their bf16 queries lie at address `queries`,
    rows `stride` bytes apart, heads end to end."""

    start: int
    rows: int
    group: int
    queries: int
    stride: int
    window: int
    scaling: np.float32
    softcap: np.float32


class Scratch(NamedTuple):
    """A thread's buffers: panels of a chunk's `keys` and `values`, `scores` and bf16 `weights` [folded rows, CHUNK],
    `sums` and what a chunk adds to them [folded rows, dim in whole panels], each row's largest score and total."""

    keys: np.ndarray
    values: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    sums: np.ndarray
    added: np.ndarray
    seen: np.ndarray


def tile_rows(group: int) -> int:
    """How many rows a tile has at most, of so many heads to a KV head: whole tiles of products."""
    return max(6, min(TILE_ROWS_MAX, FOLDED_ROWS // group // 6 * 6))


@compiled_in_order
def power_of_two(x: np.float32) -> np.float32:
    """Of x <= 0, far nearer than bf16 tells apart; NaN stays NaN."""
    x = _LOWEST if x < _LOWEST else x
    shifted = x + _ROUND
    rest = x - (shifted - _ROUND)
    power = np.float32(9.6181291e-3)
    power = power * rest + np.float32(5.5504109e-2)
    power = power * rest + np.float32(2.4022651e-1)
    power = power * rest + np.float32(6.9314718e-1)
    power = power * rest + np.float32(1.0)
    result: np.float32 = float_of_bits(np.uint32(bits_of_float(power) + (bits_of_float(shifted) << np.uint32(23))))
    return result


def _emit_largest(builder: Any, *where: Any) -> None:
    scores, registers, out = where
    lowest = ir.Constant(_FLOATS, [ir.Constant(_F32, -math.inf)] * LANES)

    def larger_of(found: Any, more: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", more, found), more, found)

    def see_register(index: Any, values: list[Any]) -> list[Any]:
        return [larger_of(values[0], _load(builder, builder.add(scores, builder.shl(index, _I64(6))), _FLOATS))]

    [found] = _loop(builder, registers, [lowest], see_register)
    for step in (8, 4, 2, 1):
        order = ir.Constant(_INTS, [_I32((lane + step) % LANES) for lane in range(LANES)])
        found = larger_of(found, builder.shuffle_vector(found, found, order))
    _store(builder, builder.extract_element(found, _I32(0)), out)


# (scores, registers of them, out): the largest that is a number.
largest_of = _outlined("headstart_largest", 3, _emit_largest)


@compiled
def weigh(row: tuple[np.ndarray, np.ndarray], span: tuple[int, int], scaling: tuple[np.float32, np.float32],
          seen: np.ndarray) -> np.float32:
    """Scores to weights in this chunk (a `row` of both, whole registers of weights), where it sees
    [span[0], span[1]); elsewhere as good as 0. What was summed before is to be multiplied by the result. `scaling` is
    (scaling, softcap); `seen` the row's largest score and total, which are brought on."""
    scores, weights = row
    begin, end = span
    if end <= begin:
        for index in range(len(weights)):
            weights[index] = 0
        return np.float32(1.0)
    factor = scaling[0] * _LOG2_E
    if scaling[1] > 0:
        for index in range(len(weights)):
            scores[index] = tanh(scores[index] * (scaling[0] / scaling[1]))
        factor = scaling[1] * _LOG2_E
    for index in range(begin):
        scores[index] = -np.inf
    for index in range(end, len(weights)):
        scores[index] = -np.inf
    before = seen[0]
    largest_of((address_of(scores), len(weights) // LANES, address_of(seen)))
    largest = max(before, seen[0] * factor)
    for index in range(len(weights)):
        scores[index] = power_of_two(scores[index] * factor - largest)
        weights[index] = to_bf16(scores[index])
    change = power_of_two(before - largest)
    seen[0] = largest
    seen[1] = seen[1] * change + sum_of(scores[:len(weights)])
    return change


@compiled
def whole_registers(width: int) -> int:
    return (width + LANES - 1) // LANES * LANES


@compiled
def _weigh_chunk(tile: Tile, scratch: Scratch, begin: int, width: int) -> None:
    whole = whole_registers(width)
    for row in range(tile.group * tile.rows):
        position = tile.start + row % tile.rows
        first = min(whole, max(0, position + 1 - tile.window - begin)) if tile.window else 0
        last = max(first, min(width, position + 1 - begin))
        change = weigh((scratch.scores[row], scratch.weights[row, :whole]), (first, last),
                       (tile.scaling, tile.softcap), scratch.seen[row])
        if change != 1:
            sums = scratch.sums[row]
            for index in range(len(sums)):
                sums[index] *= change


@compiled
def _score_chunk(tile: Tile, dim: int, scratch: Scratch, width: int) -> None:
    for panel in range((width + PANEL - 1) // PANEL):
        keys = address_of(scratch.keys) + panel * (dim // 2 * PAIR_BYTES)
        for head in range(tile.group):
            scores = address_of(scratch.scores[head * tile.rows]) + panel * 4 * PANEL
            panel_product(Matrix(tile.queries + head * dim * 2, tile.stride, dim), tile.rows, keys,
                          Matrix(scores, 4 * CHUNK, PANEL))


@compiled
def _add_values(rows: int, scratch: Scratch, width: int) -> None:
    weights = Matrix(address_of(scratch.weights), 2 * CHUNK, whole_registers(width))
    stride = scratch.added.strides[0]
    for panel in range(scratch.added.shape[1] // PANEL):
        panel_product(weights, rows, address_of(scratch.values) + panel * (CHUNK // 2 * PAIR_BYTES),
                      Matrix(address_of(scratch.added) + panel * 4 * PANEL, stride, PANEL))
    for row in range(rows):
        sums, added = scratch.sums[row], scratch.added[row]
        for index in range(len(sums)):
            sums[index] += added[index]


@compiled
def attend_tile(tile: Tile, blocks: Blocks, scratch: Scratch, results: np.ndarray) -> None:
    """Into `results` [rows, heads of the group * dim], bf16."""
    rows, end = tile.group * tile.rows, tile.start + tile.rows
    begin = max(0, tile.start + 1 - tile.window) // LANES * LANES if tile.window else 0
    for row in range(rows):
        scratch.seen[row, 0] = -np.inf
        scratch.seen[row, 1] = 0
        sums = scratch.sums[row]
        for index in range(len(sums)):
            sums[index] = 0
    while begin < end:
        width = min(CHUNK, end - begin)
        pack(blocks, begin, width, (address_of(scratch.keys), address_of(scratch.values)))
        _score_chunk(tile, blocks.dim, scratch, width)
        _weigh_chunk(tile, scratch, begin, width)
        _add_values(rows, scratch, width)
        begin += CHUNK
    for row in range(rows):
        head, result = row // tile.rows, results[row % tile.rows]
        sums, total = scratch.sums[row], scratch.seen[row, 1]
        for index in range(blocks.dim):
            result[head * blocks.dim + index] = to_bf16(sums[index] / total)
