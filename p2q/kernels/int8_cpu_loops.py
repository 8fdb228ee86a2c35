"""The loops of `int8_cpu`, compiled by numba: a tile of rows times 16 columns, and a worker that takes tiles in turn.

The tile is written in LLVM's vectors, which numba's own loops are not turned into: 32 weights are widened to int16 and
pairs of products are added in int32. LLVM knows that as one instruction on x86 (vpmaddwd, vpdpwssd) and builds it of
others elsewhere. int16 holds every int8 and int32 every sum of two products of them, so that nothing saturates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

COLUMNS = 16
"""Columns of a tile: rows of the weight that lie interleaved in memory."""

PAIRS = 4
"""K is a multiple of this many pairs, so that few rows can spread theirs over as many independent sums."""

FIELDS = ("x", "w", "s_x", "s_w", "out", "m", "n", "pairs", "rows_a_task", "panels_a_task", "next_task")
"""What a worker is given: an array of int64 with these addresses and sizes. `s_x` 0: the output stays int32."""

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_ACC = ir.VectorType(_I32, COLUMNS)
_SCALED = ir.VectorType(_F32, COLUMNS)


def _pick(builder: Any, vector: Any, indices: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, len(indices)), list(indices))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _broadcast(builder: Any, value: Any) -> Any:
    one = ir.Constant(ir.VectorType(value.type, COLUMNS), ir.Undefined)
    return _pick(builder, builder.insert_element(one, value, ir.Constant(_I32, 0)), [0] * COLUMNS)


def _load(builder: Any, address: Any, kind: ir.Type, align: int) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _tile(rows: int, sums: int) -> Callable[..., None]:
    """An intrinsic: `rows` rows of activations times one panel of weights, each over `sums` interleaved sums."""

    @intrinsic
    def tile(
        typing_context: Any, x: Any, w: Any, pairs: Any, s_x: Any, s_w: Any, out: Any, stride: Any
    ) -> tuple[Any, Any]:
        """x: int16 rows of `pairs` pairs; w: the panel; out: rows of 4 bytes, `stride` bytes apart."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x, w, pairs, s_x, s_w, out, stride = arguments

            def at(address: Any, index: Any, size: Any) -> Any:
                return builder.add(address, builder.mul(index, size))

            def number(value: int) -> Any:
                return ir.Constant(_I64, value)

            row_size = builder.mul(pairs, number(4))
            zero = ir.Constant(_ACC, [0] * COLUMNS)
            acc = [[cgutils.alloca_once_value(builder, zero) for _ in range(sums)] for _ in range(rows)]
            with cgutils.for_range(builder, builder.udiv(pairs, number(sums))) as loop:
                for s in range(sums):
                    pair = builder.add(builder.mul(loop.index, number(sums)), number(s))
                    weight = _load(builder, at(w, pair, number(2 * COLUMNS)), ir.VectorType(_I8, 2 * COLUMNS), 1)
                    weight = builder.sext(weight, ir.VectorType(_I16, 2 * COLUMNS))
                    weight = builder.sext(weight, ir.VectorType(_I32, 2 * COLUMNS))
                    for r in range(rows):
                        two = _load(builder, at(at(x, number(r), row_size), pair, number(4)), _I32, 4)
                        value = builder.bitcast(_broadcast(builder, two), ir.VectorType(_I16, 2 * COLUMNS))
                        product = builder.mul(weight, builder.sext(value, weight.type))
                        even, odd = (_pick(builder, product, range(i, 2 * COLUMNS, 2)) for i in (0, 1))
                        total = builder.add(builder.load(acc[r][s]), builder.add(even, odd))
                        builder.store(total, acc[r][s])
            for r in range(rows):
                total = builder.load(acc[r][0])
                for s in range(1, sums):
                    total = builder.add(total, builder.load(acc[r][s]))
                target = builder.inttoptr(at(out, number(r), stride), _ACC.as_pointer())
                with builder.if_else(builder.icmp_unsigned("==", s_x, number(0))) as (unscaled, scaled):
                    with unscaled:
                        builder.store(total, target, align=4)
                    with scaled:
                        # The contract's epilogue: each operation rounds once, as no fast-math flag lets LLVM fuse any.
                        value = builder.fmul(_load(builder, s_w, _SCALED, 4), builder.sitofp(total, _SCALED))
                        token = _load(builder, at(s_x, number(r), number(4)), _F32, 4)
                        value = builder.fmul(_broadcast(builder, token), value)
                        builder.store(builder.bitcast(value, _ACC), target, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return tile  # type: ignore[no-any-return]


_tile_of_4, _tile_of_2, _tile_of_1 = _tile(4, 1), _tile(2, 2), _tile(1, 4)


@intrinsic
def _take(typing_context: Any, counter: Any) -> tuple[Any, Any]:
    """Add one to the int64 at an address, atomically, and give what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, ir.Constant(_I64, 1), "monotonic")

    return types.int64(types.int64), generate


def _work(fields: Any) -> None:
    x, w, s_x, s_w, out, m, n, pairs, rows_a_task, panels_a_task, next_task = carray(fields, len(FIELDS))
    panels = n // COLUMNS
    groups = (panels + panels_a_task - 1) // panels_a_task
    tasks = groups * ((m + rows_a_task - 1) // rows_a_task)
    # Whoever comes takes the next task: all are done however many threads the runtime gives.
    while True:
        task = _take(next_task)
        if task >= tasks:
            return
        first_row = task // groups * rows_a_task
        end_row = min(first_row + rows_a_task, m)
        first_panel = task % groups * panels_a_task
        for panel in range(first_panel, min(first_panel + panels_a_task, panels)):
            column = panel * COLUMNS * 4
            weight = w + panel * pairs * 2 * COLUMNS
            row = first_row
            while row < end_row:
                values, scale, target = x + row * pairs * 4, s_x and s_x + row * 4, out + row * n * 4 + column
                if row + 4 <= end_row:
                    _tile_of_4(values, weight, pairs, scale, s_w + column, target, n * 4)
                    row += 4
                elif row + 2 <= end_row:
                    _tile_of_2(values, weight, pairs, scale, s_w + column, target, n * 4)
                    row += 2
                else:
                    _tile_of_1(values, weight, pairs, scale, s_w + column, target, n * 4)
                    row += 1


def _compiled() -> Any:
    signature = types.void(types.CPointer(types.int64))
    options = {"nopython": True, "error_model": "numpy"}
    try:
        return cfunc(signature, cache=True, **options)(_work)
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return cfunc(signature, **options)(_work)


worker = _compiled()
"""`worker.address`: void (*)(int64_t fields[]), which may run in many threads over the same fields at once."""
