"""What numba cannot say: the few machine operations the kernels are made of, as numba intrinsics.

Products of bf16 pairs summed in float32 (AVX512-BF16), blocks of keys and values by address, atomics and a futex. An
address is an int64; none is checked. x86-64 Linux with AVX512-BF16 alone: who calls has made sure of that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

PANEL = 64      # outputs that lie side by side in a packed weight
LANES = 16      # float32 numbers in a register
ROWS_AT_ONCE = 6    # more rows' sums do not fit into the registers
FUTEX, WAIT, WAKE = 202, 128, 129       # the system call's number, and its private operations

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Runs without the GIL; sums may be taken in any order, infinities and NaN stay what they are."""
    made: Function = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True,
                                fastmath={"reassoc", "contract", "nsz"})(function)
    return made


def compiled_in_order(function: Function) -> Function:
    """The same where every operation must happen in the order written."""
    made: Function = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True,
                                fastmath={"contract"})(function)
    return made


def compiled_and_kept(function: Function) -> Function:
    """The same, its code kept with that of all it calls where numba was told a folder for it, and nowhere else."""
    made: Function = numba.njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True,
                                cache=bool(numba.config.CACHE_DIR))(function)
    return made


class _Bfloat16(ir.Type):  # type: ignore[misc]
    """llvmlite has no name for this type of LLVM's."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat16)

    def __hash__(self) -> int:
        return hash(_Bfloat16)


_I8, _I16, _I32, _I64, _F32, _BF16 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), \
    _Bfloat16()
_FLOATS, _INTS, _PAIRS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES), ir.VectorType(_BF16, 2 * LANES)
_HALVES = ir.VectorType(_I16, 2 * LANES)
_ZEROS = ir.Constant(_FLOATS, [ir.Constant(_F32, 0.0)] * LANES)


def _external(builder: Any, name: str, kind: ir.FunctionType) -> Any:
    return builder.module.globals.get(name) or ir.Function(builder.module, kind, name)


def _at(builder: Any, address: Any, kind: ir.Type, offset: int = 0) -> Any:
    moved = builder.add(address, _I64(offset)) if offset else address
    return builder.inttoptr(moved, kind.as_pointer())


def _load(builder: Any, address: Any, kind: ir.Type, offset: int = 0) -> Any:
    return builder.load(_at(builder, address, kind, offset), align=2)


def _store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    builder.store(value, _at(builder, address, value.type, offset), align=2)


def _sum_of_pairs(builder: Any, so_far: Any, left: Any, right: Any) -> Any:
    """so_far[i] + left[2i] * right[2i] + left[2i + 1] * right[2i + 1], of sixteen i."""
    product = _external(builder, "llvm.x86.avx512bf16.dpbf16ps.512",
                        ir.FunctionType(_FLOATS, [_FLOATS, _PAIRS, _PAIRS]))
    return builder.call(product, [so_far, builder.bitcast(left, _PAIRS), builder.bitcast(right, _PAIRS)])


def _pair_everywhere(builder: Any, address: Any, offset: int = 0) -> Any:
    nothing = ir.Constant(_INTS, ir.Undefined)
    first = builder.insert_element(nothing, _load(builder, address, _I32, offset), _I32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(_INTS, [_I32(0)] * LANES))


def _loop(builder: Any, count: Any, starts: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
    """`body(index, values)` gives the next values; `count` is at least one."""
    entry, block = builder.block, builder.append_basic_block()
    done = builder.append_basic_block()
    builder.branch(block)
    builder.position_at_end(block)
    index = builder.phi(_I64)
    index.add_incoming(_I64(0), entry)
    values = []
    for start in starts:
        values.append(value := builder.phi(start.type))
        value.add_incoming(start, entry)
    results = body(index, values)
    after = builder.add(index, _I64(1))
    index.add_incoming(after, builder.block)
    for value, result in zip(values, results, strict=True):
        value.add_incoming(result, builder.block)
    builder.cbranch(builder.icmp_signed("<", after, count), block, done)
    builder.position_at_end(done)
    return results


def _outlined(name: str, count: int, emit: Callable[..., None]) -> Any:
    """An intrinsic that takes a tuple of `count` integers to `emit(builder, *integers)`.

    As a function of its own in the machine code: what is called from many places is then compiled once.
    """
    kind = ir.FunctionType(ir.VoidType(), [_I64] * count)

    @intrinsic  # type: ignore[untyped-decorator]
    def called(typing_context: Any, where: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            function = builder.module.globals.get(name)
            if function is None:
                function = ir.Function(builder.module, kind, name)
                function.linkage = "linkonce_odr"
                function.attributes.add("noinline")
                inside = ir.IRBuilder(function.append_basic_block())
                emit(inside, *function.args)
                inside.ret_void()
            builder.call(function, [builder.extract_value(arguments[0], index) for index in range(count)])
            return context.get_dummy_value()

        return types.void(types.UniTuple(types.int64, count)), generate

    return called


def _emit_tile(rows: int, builder: Any, *where: Any) -> None:
    """`rows` rows of bf16 times one panel: [rows, 64] float32. Asks for what lies `ahead` meanwhile."""
    x, x_stride, pairs, panel, out, out_stride, ahead = where
    prefetch = _external(builder, "llvm.prefetch.p0", ir.FunctionType(
        ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]))
    x_rows = [builder.add(x, builder.mul(x_stride, _I64(row))) for row in range(rows)]

    def add_pair(index: Any, sums: list[Any]) -> list[Any]:
        here = builder.add(panel, builder.shl(index, _I64(8)))
        weights = [_load(builder, here, _INTS, 64 * part) for part in range(4)]
        next_panel = builder.add(ahead, builder.shl(index, _I64(7)))
        for line in range(2):
            builder.call(prefetch, [_at(builder, next_panel, _I8, 64 * line), _I32(0), _I32(2), _I32(1)])
        offset, results = builder.shl(index, _I64(2)), []
        for row in range(rows):
            given = _pair_everywhere(builder, builder.add(x_rows[row], offset))
            results += [_sum_of_pairs(builder, sums[4 * row + part], given, weights[part]) for part in range(4)]
        return results

    sums = _loop(builder, pairs, [_ZEROS] * (4 * rows), add_pair)
    for row in range(rows):
        to = builder.add(out, builder.mul(out_stride, _I64(row)))
        for part in range(4):
            _store(builder, sums[4 * row + part], to, 64 * part)


# Each (x, bytes a row, pairs of inputs, panel, out, bytes a row of out, ahead).
tile_1, tile_2, tile_3, tile_4, tile_5, tile_6 = (
    _outlined(f"headstart_tile_{rows}", 7, partial(_emit_tile, rows)) for rows in range(1, ROWS_AT_ONCE + 1))


def _sums_across(builder: Any, vectors: list[Any]) -> Any:
    """Of sixteen registers the sum of each, in one register."""
    even = ir.Constant(_INTS, [_I32(lane) for lane in range(0, 2 * LANES, 2)])
    odd = ir.Constant(_INTS, [_I32(lane) for lane in range(1, 2 * LANES, 2)])
    while len(vectors) > 1:
        vectors = [builder.fadd(builder.shuffle_vector(left, right, even), builder.shuffle_vector(left, right, odd))
                   for left, right in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _emit_scores(builder: Any, *where: Any) -> None:
    """Products of a query with sixteen keys, into float32 `out`."""
    query, keys, stride, registers, out = where
    addresses = [builder.add(keys, builder.mul(stride, _I64(key))) for key in range(LANES)]

    def add_register(index: Any, sums: list[Any]) -> list[Any]:
        offset = builder.shl(index, _I64(6))
        asked = _load(builder, builder.add(query, offset), _INTS)
        return [_sum_of_pairs(builder, total, asked, _load(builder, builder.add(address, offset), _INTS))
                for total, address in zip(sums, addresses, strict=True)]

    _store(builder, _sums_across(builder, _loop(builder, registers, [_ZEROS] * LANES, add_register)), out)


def _emit_weighing(builder: Any, *where: Any) -> None:
    """Adds sixteen values, each times its bf16 weight, to float32 `out`."""
    weights, values, stride, registers, out = where
    addresses = [builder.add(values, builder.mul(stride, _I64(key))) for key in range(LANES)]
    given = [_pair_everywhere(builder, weights, 4 * pair) for pair in range(LANES // 2)]
    low, high = (ir.Constant(ir.VectorType(_I32, 2 * LANES), [
        _I32(first + lane // 2 + lane % 2 * 2 * LANES) for lane in range(2 * LANES)]) for first in (0, LANES))

    def add_register(index: Any, _: list[Any]) -> list[Any]:
        offset = builder.shl(index, _I64(6))
        to = builder.add(out, builder.shl(index, _I64(7)))
        sums = [_load(builder, to, _FLOATS), _load(builder, to, _FLOATS, 64)]
        for pair in range(LANES // 2):
            first, second = (_load(builder, builder.add(addresses[2 * pair + each], offset), _HALVES)
                             for each in range(2))
            sums = [_sum_of_pairs(builder, total, given[pair], builder.shuffle_vector(first, second, order))
                    for total, order in zip(sums, (low, high), strict=True)]
        _store(builder, sums[0], to)
        _store(builder, sums[1], to, 64)
        return []

    _loop(builder, registers, [], add_register)


# (query, keys, bytes a key, registers a key, out) and (weights, values, bytes a value, registers a value, out).
score_16 = _outlined("headstart_score_16", 5, _emit_scores)
weigh_16 = _outlined("headstart_weigh_16", 5, _emit_weighing)


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(typing_context: Any, to: Any, source: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _I8.as_pointer()
        copy = _external(builder, "llvm.memcpy.p0.p0.i64",
                         ir.FunctionType(ir.VoidType(), [pointer, pointer, _I64, ir.IntType(1)]))
        to, source, count = arguments
        builder.call(copy, [_at(builder, to, _I8), _at(builder, source, _I8), count, ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def clear_bytes(typing_context: Any, to: Any, count: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        clear = _external(builder, "llvm.memset.p0.i64",
                          ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I8, _I64, ir.IntType(1)]))
        builder.call(clear, [_at(builder, arguments[0], _I8), _I8(0), arguments[1], ir.IntType(1)(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _F32)

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def bits_of_float(typing_context: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _I32)

    return types.uint32(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def to_bf16(typing_context: Any, number: Any) -> Any:
    """Rounded to nearest, as the bits that a uint16 array keeps."""
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.fptrunc(arguments[0], _BF16), _I16)

    return types.uint16(types.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(typing_context: Any, address: Any, amount: Any) -> Any:
    """What was at `address` before, an int32."""
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", _at(builder, arguments[0], _I32), arguments[1], "seq_cst")

    return types.int32(types.int64, types.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def pause(typing_context: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(_external(builder, "llvm.x86.sse2.pause", ir.FunctionType(ir.VoidType(), [])), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_at(builder, arguments[0], _I32), "seq_cst", 4)

    return types.int32(types.int64), generate


_system_call = types.ExternalFunction("syscall", types.int64(*(types.int64,) * 7))


@compiled_in_order
def sleep_while(address: int, value: int) -> None:
    """Until somebody wakes, unless the int32 at `address` is another already."""
    _system_call(FUTEX, address, WAIT, value, 0, 0, 0)


@compiled_in_order
def wake_all(address: int) -> None:
    _system_call(FUTEX, address, WAKE, 2**31 - 1, 0, 0, 0)
