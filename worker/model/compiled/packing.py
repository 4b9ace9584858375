"""Keys and values out of their blocks into panels, so that many rows' attention is products like all others.

A panel is what a packed weight is made of: 64 outputs side by side, two inputs of each at a time. Of keys the outputs
are keys and the inputs a head's numbers; of values the outputs are numbers and the inputs keys. Sixteen keys at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from worker.model.compiled.machine import (
    _HALVES,
    _I32,
    _I64,
    _INTS,
    LANES,
    PANEL,
    _load,
    _loop,
    _outlined,
    _store,
    compiled,
)

CHUNK = 256             # positions packed at a time
PAIR_BYTES = 4 * PANEL  # two inputs of a panel


def _two_of(builder: Any, left: Any, right: Any, step: int) -> tuple[Any, Any]:
    """Swaps what is off the diagonal, of lanes `step` apart."""
    upper = [_I32(lane if not lane & step else LANES + lane - step) for lane in range(LANES)]
    lower = [_I32(lane + step if not lane & step else LANES + lane) for lane in range(LANES)]
    return (builder.shuffle_vector(left, right, ir.Constant(_INTS, upper)),
            builder.shuffle_vector(left, right, ir.Constant(_INTS, lower)))


def _emit_keys(builder: Any, *where: Any) -> None:
    keys, stride, registers, to = where

    def pack_register(index: Any, _: list[Any]) -> list[Any]:
        here = builder.add(keys, builder.shl(index, _I64(6)))
        rows = [_load(builder, builder.add(here, builder.mul(stride, _I64(key))), _INTS) for key in range(LANES)]
        for step in (1, 2, 4, 8):
            for row in range(LANES):
                if not row & step:
                    rows[row], rows[row + step] = _two_of(builder, rows[row], rows[row + step], step)
        there = builder.add(to, builder.mul(index, _I64(LANES * PAIR_BYTES)))
        for pair, row_of_pair in enumerate(rows):
            _store(builder, row_of_pair, there, PAIR_BYTES * pair)
        return []

    _loop(builder, registers, [], pack_register)


def _emit_values(builder: Any, *where: Any) -> None:
    values, stride, registers, to, panel_bytes = where
    orders = [ir.Constant(ir.VectorType(_I32, 2 * LANES), [
        _I32(first + lane // 2 + lane % 2 * 2 * LANES) for lane in range(2 * LANES)]) for first in (0, LANES)]

    def pack_register(index: Any, _: list[Any]) -> list[Any]:
        here = builder.add(values, builder.shl(index, _I64(6)))
        half = builder.shl(builder.and_(index, _I64(1)), _I64(7))
        there = builder.add(builder.add(to, half), builder.mul(builder.lshr(index, _I64(1)), panel_bytes))
        for pair in range(LANES // 2):
            first, second = (_load(builder, builder.add(here, builder.mul(stride, _I64(2 * pair + each))), _HALVES)
                             for each in range(2))
            for part, order in enumerate(orders):
                _store(builder, builder.shuffle_vector(first, second, order), there, PAIR_BYTES * pair + 64 * part)
        return []

    _loop(builder, registers, [], pack_register)


# (keys, bytes a key, registers a key, to) and (values, bytes a value, registers a value, to, bytes a panel).
pack_16_keys = _outlined("headstart_pack_16_keys", 4, _emit_keys)
pack_16_values = _outlined("headstart_pack_16_values", 5, _emit_values)


class Blocks(NamedTuple):
    """One KV head's blocks of one sequence: block `table[i]` of keys lies at `keys + table[i] * size * dim * 2`."""

    table: np.ndarray
    keys: int
    values: int
    size: int
    dim: int


@compiled
def pack(blocks: Blocks, begin: int, count: int, to: tuple[int, int]) -> None:
    """Positions from `begin` on, a multiple of 16, at least `count` and at most CHUNK, to (keys, values)."""
    dim, registers = blocks.dim, blocks.dim // (2 * LANES)
    for first in range(0, count, LANES):
        position = begin + first
        slot = blocks.table[position // blocks.size] * blocks.size + position % blocks.size
        panel = first // PANEL * (dim // 2 * PAIR_BYTES) + first % PANEL * 4
        pack_16_keys((blocks.keys + slot * dim * 2, dim * 2, registers, to[0] + panel))
        pack_16_values((blocks.values + slot * dim * 2, dim * 2, registers, to[1] + first // 2 * PAIR_BYTES,
                        CHUNK // 2 * PAIR_BYTES))
