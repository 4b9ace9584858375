"""The pieces of a decode step that numba compiles: products over panels, norms, activations, attention of one row.

Rows are float32 where they are added to, bf16 (as uint16) where a product reads them. Pure arithmetic on what is
handed in; nothing is allocated, no bound is checked.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from worker.model.compiled.int8_machine import (
    SCALES_BYTES,
    int8_tile_1,
    int8_tile_2,
    int8_tile_3,
    int8_tile_4,
    int8_tile_5,
)
from worker.model.compiled.machine import (
    LANES,
    PANEL,
    ROWS_AT_ONCE,
    bits_of_float,
    compiled,
    compiled_in_order,
    float_of_bits,
    score_16,
    tile_1,
    tile_2,
    tile_3,
    tile_4,
    tile_5,
    tile_6,
    to_bf16,
    weigh_16,
)

SILU, GELU_TANH, GELU = range(3)
_ROUND = np.float32(1.5 * 2**23)    # adding it leaves a whole number in a float's lowest bits
_LOG2_E, _LN_2_HIGH, _LN_2_LOW = np.float32(math.log2(math.e)), np.float32(0.693359375), np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.0)         # e to this is the smallest normal float32, more or less
_HIGHEST = np.float32(88.0)


class Matrix(NamedTuple):
    """Rows of `width` numbers at `address`, `stride` bytes apart."""

    address: int
    stride: int
    width: int


class Weight(NamedTuple):
    """Panels of bf16, or of 8 bits, at `address`."""

    address: int
    is_int8: bool


@compiled_in_order
def exp(x: np.float32) -> np.float32:
    """To about two units in the last place; NaN stays NaN."""
    x = _LOWEST if x < _LOWEST else x
    x = _HIGHEST if x > _HIGHEST else x
    shifted = x * _LOG2_E + _ROUND
    whole = shifted - _ROUND
    rest = x - whole * _LN_2_HIGH - whole * _LN_2_LOW
    power = np.float32(1.9875691500e-4)
    power = power * rest + np.float32(1.3981999507e-3)
    power = power * rest + np.float32(8.3334519073e-3)
    power = power * rest + np.float32(4.1665795894e-2)
    power = power * rest + np.float32(1.6666665459e-1)
    power = power * rest + np.float32(0.5)
    power = power * rest * rest + rest + np.float32(1.0)
    scale = float_of_bits(np.uint32((bits_of_float(shifted) << np.uint32(23)) + np.uint32(0x3F800000)))
    result: np.float32 = power * scale
    return result


@compiled_in_order
def tanh(x: np.float32) -> np.float32:
    return np.float32(1.0) - np.float32(2.0) / (exp(np.float32(2.0) * x) + np.float32(1.0))


@compiled
def panel_product(x: Matrix, rows: int, panel: int, out: Matrix) -> None:
    """`rows` rows of bf16 `x` times the packed panel of 64 outputs at address `panel`, into float32 `out`."""
    pairs = x.width // 2
    ahead = panel + pairs * 4 * PANEL
    tiles = (rows + ROWS_AT_ONCE - 1) // ROWS_AT_ONCE
    begin = 0
    for tile in range(tiles):
        count = (rows - begin + tiles - tile - 1) // (tiles - tile)
        where = (x.address + begin * x.stride, x.stride, pairs, panel, out.address + begin * out.stride, out.stride,
                 ahead + (tile % 2) * pairs * 2 * PANEL)
        if count == 1:
            tile_1(where)
        elif count == 2:
            tile_2(where)
        elif count == 3:
            tile_3(where)
        elif count == 4:
            tile_4(where)
        elif count == 5:
            tile_5(where)
        else:
            tile_6(where)
        begin += count


@compiled
def int8_panel_product(x: Matrix, rows: int, panel: int, out: Matrix) -> None:
    """The same with a panel of 8 bits, for INT8_ROWS_MAX rows at most."""
    where = (x.address, x.stride, x.width // 2, panel, out.address, out.stride)
    if rows == 1:
        int8_tile_1(where)
    elif rows == 2:
        int8_tile_2(where)
    elif rows == 3:
        int8_tile_3(where)
    elif rows == 4:
        int8_tile_4(where)
    else:
        int8_tile_5(where)


@compiled
def panel_of(weight: Weight, width: int, index: int) -> Weight:
    """Of a weight of `width` inputs."""
    panel_bytes = width * PANEL + SCALES_BYTES if weight.is_int8 else width * 2 * PANEL
    return Weight(weight.address + index * panel_bytes, weight.is_int8)


@compiled
def weight_product(x: Matrix, rows: int, panel: Weight, out: Matrix) -> None:
    """panel_product of whichever kind."""
    if panel.is_int8:
        int8_panel_product(x, rows, panel.address, out)
    else:
        panel_product(x, rows, panel.address, out)


@compiled
def address_of(array: np.ndarray) -> int:
    return array.ctypes.data + 0


@compiled
def inverse_rms(x: np.ndarray, eps: np.float32) -> np.float32:
    total = np.float32(0.0)
    for index in range(len(x)):
        total += x[index] * x[index]
    inverse: np.float32 = np.float32(1.0) / np.sqrt(total / np.float32(len(x)) + eps)
    return inverse


@compiled
def norm_into(x: np.ndarray, weight: np.ndarray, eps: np.float32, out: np.ndarray) -> None:
    """The RMS norm of float32 `x`, in bf16."""
    scale = inverse_rms(x, eps)
    for index in range(len(x)):
        out[index] = to_bf16(x[index] * scale * weight[index])


@compiled
def add_scaled(x: np.ndarray, added: np.ndarray, factor: np.float32) -> None:
    for index in range(len(x)):
        x[index] += added[index] * factor


@compiled
def add_normed(x: np.ndarray, added: np.ndarray, weight: np.ndarray, scaling: tuple[np.float32, np.float32]) -> None:
    """Adds the RMS norm of `added`, times a factor; `scaling` is (eps, factor)."""
    scale = inverse_rms(added[:len(x)], scaling[0]) * scaling[1]
    for index in range(len(x)):
        x[index] += added[index] * scale * weight[index]


@compiled
def gate_into(gate: np.ndarray, up: np.ndarray, activation: int, out: np.ndarray) -> None:
    """activation(gate) * up in bf16."""
    one, half = np.float32(1.0), np.float32(0.5)
    if activation == SILU:
        for index in range(len(out)):
            out[index] = to_bf16(gate[index] / (one + exp(-gate[index])) * up[index])
    elif activation == GELU_TANH:
        for index in range(len(out)):
            x = gate[index]
            inner = np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)
            out[index] = to_bf16(half * x * (one + tanh(inner)) * up[index])
    else:
        for index in range(len(out)):
            x = gate[index]
            out[index] = to_bf16(half * x * (one + np.float32(math.erf(x * np.float32(0.7071067812)))) * up[index])


@compiled
def turn(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray) -> None:
    """One head after its rope, which may turn its first numbers only, in bf16."""
    half = len(cos) // 2
    for index in range(half):
        low, high = x[index], x[index + half]
        out[index] = to_bf16(low * cos[index] - high * sin[index])
        out[index + half] = to_bf16(high * cos[index + half] + low * sin[index + half])
    for index in range(2 * half, len(x)):
        out[index] = to_bf16(x[index])


@compiled
def norm_in_place(x: np.ndarray, weight: np.ndarray, eps: np.float32) -> None:
    scale = inverse_rms(x, eps)
    for index in range(len(x)):
        x[index] = x[index] * scale * weight[index]


class Seen(NamedTuple):
    """What one head of one row sees: positions [begin, end), in blocks of `block_size` keys of `dim` numbers, block
    `table[i]` at `keys + table[i] * block_bytes` and at `values` alike."""

    begin: int
    end: int
    table: np.ndarray
    keys: int
    values: int
    block_size: int
    dim: int
    scaling: np.float32
    softcap: np.float32


@compiled
def _largest(scores: np.ndarray, begin: int, end: int) -> np.float32:
    found = np.float32(-np.inf)
    for index in range(begin, end):
        found = scores[index] if scores[index] > found else found
    return found


@compiled
def sum_of(x: np.ndarray) -> np.float32:
    """In a loop that also stores, the order would depend on how near each other the arrays happen to lie."""
    total = np.float32(0.0)
    for index in range(len(x)):
        total += x[index]
    return total


@compiled
def softmax_into(scores: np.ndarray, begin: int, end: int, weights: np.ndarray) -> np.float32:
    """exp(score - largest), in place and in bf16, where nothing is outside [begin, end); returns their sum."""
    largest = _largest(scores, begin, end)
    for index in range(begin):
        weights[index] = 0
    for index in range(end, len(weights)):
        weights[index] = 0
    for index in range(begin, end):
        scores[index] = exp(scores[index] - largest)
        weights[index] = to_bf16(scores[index])
    return sum_of(scores[begin:end])


@compiled
def attend(query: int, seen: Seen, scratch: tuple[np.ndarray, np.ndarray, np.ndarray], out: np.ndarray) -> None:
    """One head's attention, in bf16. `query` is the address of its bf16 numbers; `scratch`: float32 scores and bf16
    weights, one a position of the blocks seen, and float32 sums [dim]."""
    scores, weights, sums = scratch
    block_bytes, row_bytes, registers = seen.block_size * seen.dim * 2, seen.dim * 2, seen.dim // (2 * LANES)
    first, last = seen.begin // seen.block_size, (seen.end - 1) // seen.block_size
    base, size = first * seen.block_size, (last + 1 - first) * seen.block_size
    to, parts = address_of(scores), seen.block_size // LANES
    for block in range(first, last + 1):
        keys = seen.keys + seen.table[block] * block_bytes
        for part in range(parts):
            score_16((query, keys + part * LANES * row_bytes, row_bytes, registers, to))
            to += 4 * LANES
    if seen.softcap > 0:
        for index in range(size):
            scores[index] = seen.softcap * tanh(scores[index] * (seen.scaling / seen.softcap))
    else:
        for index in range(size):
            scores[index] *= seen.scaling
    total = softmax_into(scores, seen.begin - base, seen.end - base, weights[:size])
    for index in range(seen.dim):
        sums[index] = 0
    source = address_of(weights)
    for block in range(first, last + 1):
        values = seen.values + seen.table[block] * block_bytes
        for part in range(parts):
            weigh_16((source, values + part * LANES * row_bytes, row_bytes, registers, address_of(sums)))
            source += 2 * LANES
    for index in range(seen.dim):
        out[index] = to_bf16(sums[index] / total)


@compiled
def round_into(x: np.ndarray, out: np.ndarray) -> None:
    for index in range(len(x)):
        out[index] = to_bf16(x[index])
