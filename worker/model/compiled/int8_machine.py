"""Machine operations on weights in 8 bits: what int8_panels.py packs, times rows of bf16.

A code is a sign and seven bits of size; two looks into tables of 128 bytes make it bf16 again, exactly, and a row's
scale is applied to its sum. AVX512-VBMI besides what machine.py asks for; who calls has made sure of both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import binding, ir

from worker.model.compiled.machine import (
    _FLOATS,
    _I8,
    _I32,
    _I64,
    _INTS,
    _ZEROS,
    PANEL,
    _at,
    _external,
    _load,
    _loop,
    _outlined,
    _pair_everywhere,
    _store,
    _sum_of_pairs,
)

# Without such instructions nothing here may be called, and its functions are empty: they are compiled all the same.
MULTIPLIES_INT8 = bool(binding.get_host_cpu_features().get("avx512vbmi", False))
# For more rows multiplying takes longer than reading, and unpacking is added to it.
INT8_ROWS_MAX = 5
PAIR_BYTES = 2 * PANEL  # of one pair of inputs, all outputs of a panel
SCALES_BYTES = 4 * PANEL
_LINE = 64
_BYTES = ir.VectorType(_I8, _LINE)


def _bf16_of(size: int) -> int:
    """The bits of a whole number below 128."""
    if size == 0:
        return 0
    exponent = size.bit_length() - 1
    return (127 + exponent) << 7 | (size << (7 - exponent)) & 0x7F


def _table(shift: int, first: int) -> Any:
    return ir.Constant(_BYTES, [_I8(_bf16_of(size) >> shift & 0xFF) for size in range(first, first + _LINE)])


def _bytes_of(shift: int, builder: Any, codes: Any) -> Any:
    """Of each code's size the low (0) or the high (8) byte in bf16."""
    look = _external(builder, "llvm.x86.avx512.vpermi2var.qi.512", ir.FunctionType(_BYTES, [_BYTES] * 3))
    return builder.call(look, [_table(shift, 0), codes, _table(shift, _LINE)])


def _expanded(builder: Any, codes: Any) -> list[Any]:
    """64 codes as two registers of bf16, bytes interleaved within each quarter."""
    signs = builder.and_(codes, ir.Constant(_BYTES, [_I8(0x80)] * _LINE))
    low, high = _bytes_of(0, builder, codes), builder.or_(_bytes_of(8, builder, codes), signs)
    return [builder.bitcast(builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(_I32, _LINE), [
        _I32(16 * quarter + half + byte // 2 + byte % 2 * _LINE)
        for quarter in range(4) for byte in range(16)])), _INTS) for half in (0, 8)]


def _prefetch(builder: Any, address: Any, offset: int) -> None:
    ask = _external(builder, "llvm.prefetch.p0", ir.FunctionType(
        ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]))
    builder.call(ask, [_at(builder, address, _I8, offset), _I32(0), _I32(2), _I32(1)])


def _emit_tile(rows: int, builder: Any, *where: Any) -> None:
    """`rows` rows of bf16 times one panel: [rows, 64] float32. Asks for the next panel meanwhile."""
    x, x_stride, pairs, panel, out, out_stride = where
    codes_bytes = builder.mul(pairs, _I64(PAIR_BYTES))
    scales = builder.add(panel, codes_bytes)
    ahead = builder.add(scales, _I64(SCALES_BYTES))
    x_rows = [builder.add(x, builder.mul(x_stride, _I64(row))) for row in range(rows)]

    def add_pair(index: Any, sums: list[Any]) -> list[Any]:
        offset = builder.mul(index, _I64(PAIR_BYTES))
        here, there = builder.add(panel, offset), builder.add(ahead, offset)
        sums, pair = list(sums), builder.shl(index, _I64(2))
        for half in range(2):
            _prefetch(builder, there, _LINE * half)
            weights = _expanded(builder, _load(builder, here, _BYTES, _LINE * half))
            for row in range(rows):
                given = _pair_everywhere(builder, builder.add(x_rows[row], pair))
                for each, at in zip(weights, (4 * row + 2 * half, 4 * row + 2 * half + 1), strict=True):
                    sums[at] = _sum_of_pairs(builder, sums[at], given, each)
        return sums

    sums = _loop(builder, pairs, [_ZEROS] * (4 * rows), add_pair)
    for row in range(rows):
        to = builder.add(out, builder.mul(out_stride, _I64(row)))
        for part in range(4):
            scale = _load(builder, scales, _FLOATS, 64 * part)
            _store(builder, builder.fmul(sums[4 * row + part], scale), to, 64 * part)


# Each (x, bytes a row, pairs of inputs, panel, out, bytes a row of out).
int8_tile_1, int8_tile_2, int8_tile_3, int8_tile_4, int8_tile_5 = (
    _outlined(f"headstart_int8_tile_{rows}", 6,
              partial(_emit_tile, rows) if MULTIPLIES_INT8 else lambda builder, *where: None)
    for rows in range(1, INT8_ROWS_MAX + 1))
