"""Triton programs of the pairwise sums: what runs on the GPU. `fmicl.kernels.triton` launches them.

Two ways, for two ranges of d:

- `fused_pairs` keeps its rows' gradient in registers and passes once over all columns: z, loss, slopes and gradient
  of a tile before the next one is loaded. Nothing of size N x N is ever written.
- `tile_weights` and `apply_weights` write the slopes of a large tile to a buffer that stays in the L2 cache and
  multiply it from there: for d at which a block of rows no longer fits the registers.

Products accumulate in float32. bfloat16 inputs use the tensor cores directly, float32 inputs three TF32 products.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["apply_weights", "fused_logsumexp", "fused_pairs", "tile_weights"]


@triton.jit
def penalty_and_slope(z, order, KIND: tl.constexpr):
    """The scalar functions of `fmicl.divergences`, once more for the GPU; KIND is a name of `triton.lower`."""
    if KIND == "kl":
        e = tl.exp(z)
        return e, e
    elif KIND == "reverse_kl":
        return z - 1, tl.zeros_like(z) + 1
    elif KIND == "js":
        e = tl.exp(-tl.abs(z))
        s = 1 / (1 + e)
        return tl.maximum(z, 0) + tl.log(1 + e) - 0.6931471805599453, tl.where(z >= 0, s, e * s)
    elif KIND == "pearson":
        e = tl.exp(2 * z)
        return e - 1, 2 * e
    elif KIND == "squared_hellinger":
        e = tl.exp(0.5 * z)
        return e - 1, 0.5 * e
    elif KIND == "neyman":
        e = tl.exp(-z)
        return 2 - 2 * e, 2 * e
    elif KIND == "jeffrey":
        e = tl.exp(z)
        return e - 1 + z, e + 1
    elif KIND == "tsallis":
        e = tl.exp(order * z)
        return e + 1 / (order - 1), order * e
    elif KIND == "vlc":
        s = 1 / (1 + tl.exp(z))
        return 3 + s * (4 * s - 8), 8 * s * (1 - s) * (1 - s)
    elif KIND == "square":
        return z * z, 2 * z
    # free critics with an unbounded domain: the conjugate itself
    elif KIND == "free_pearson":
        t = tl.maximum(z, -2)
        return t * (0.25 * t + 1), 0.5 * t + 1
    elif KIND == "free_tsallis":
        base = tl.maximum(z * ((order - 1) / order), 0)
        root = tl.where(base > 0, tl.exp(tl.log(tl.maximum(base, 1e-38)) / (order - 1)), 0.0)
        return base * root + 1 / (order - 1), root
    else:
        tl.static_assert(KIND == "free_jeffrey")
        # log W(e^(1-z)) by Newton's method from above, as in fmicl.special
        s = -z
        bound = tl.minimum(0.5 * s, s + 1)
        root = tl.where(s > 0, tl.minimum(bound, tl.log(1 + tl.maximum(s, 0))), bound)
        for _ in tl.static_range(8):
            e = tl.exp(root)
            root -= (root + e - 1 - s) / (1 + e)
        return tl.exp(-root) - 1 - root, tl.exp(-root)


@triton.jit
def load_rows(base, rows, dims, limit, d, EVEN: tl.constexpr, MASK: tl.constexpr):
    """Rows of a contiguous (limit, d) matrix, zero beyond its edges; EVEN if d is not padded, MASK at the last rows."""
    pointers = base + rows[:, None].to(tl.int64) * d + dims[None, :]
    if MASK:
        return tl.load(pointers, mask=(rows[:, None] < limit) & (dims[None, :] < d), other=0.0)
    elif EVEN:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=dims[None, :] < d, other=0.0)


@triton.jit
def multiply(a, b, accumulator, PRECISE: tl.constexpr):
    """accumulator + a b on the tensor cores."""
    if PRECISE:
        return tl.dot(a, b, accumulator, input_precision="tf32x3")
    return tl.dot(a, b, accumulator)


@triton.jit
def weigh(
    z, rows, columns, n, m, order, row_value, row_gradient, column_value, column_gradient,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """What a tile of z costs, and the factors of the columns in the gradient of its rows.

    For KIND "softmax" these are the shares of log-sum-exps over rows and over columns, and nothing is summed up.
    """
    if KIND == "softmax":
        weight = tl.zeros_like(z)
        if BY_ROW:
            value = tl.load(row_value + rows, mask=rows < n, other=0.0)
            gradient = tl.load(row_gradient + rows, mask=rows < n, other=0.0)
            weight += gradient[:, None] * tl.exp(z - value[:, None])
        if BY_COLUMN:
            value = tl.load(column_value + columns, mask=columns < m, other=0.0)
            gradient = tl.load(column_gradient + columns, mask=columns < m, other=0.0)
            weight += gradient[None, :] * tl.exp(z - value[None, :])
        return tl.zeros_like(z), weight
    return penalty_and_slope(z, order, KIND)


@triton.jit
def sweep_pairs(
    accumulator, total, q, rows, columns_ptr, low, high, n, m, d, offset, scale, order, skip,
    row_value, row_gradient, column_value, column_gradient,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr,
    GRADIENT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Columns low..high against the rows q; MASK where a tile has an edge or skipped pairs in it."""
    dims = tl.arange(0, BD)
    for j in range(low, high, BN):
        columns = j + tl.arange(0, BN)
        k = load_rows(columns_ptr, columns, dims, m, d, EVEN, MASK)
        c = multiply(q, tl.trans(k), tl.zeros((q.shape[0], BN), tl.float32), PRECISE)
        penalty, slope = weigh(
            offset + scale * c, rows, columns, n, m, order, row_value, row_gradient, column_value, column_gradient,
            KIND, BY_ROW, BY_COLUMN,
        )  # fmt: skip
        if MASK:
            keep = (columns[None, :] < high) & (columns[None, :] != rows[:, None] + skip)
            penalty = tl.where(keep, penalty, 0.0)
            slope = tl.where(keep, slope, 0.0)
        if KIND != "softmax":
            total += tl.sum(penalty, 1)
        if GRADIENT:
            accumulator = multiply(slope.to(k.dtype), k, accumulator, PRECISE)
    return accumulator, total


@triton.jit
def skipped_tiles(block, start, full, skip, BM: tl.constexpr, BN: tl.constexpr):
    """The columns from..to of start..full, rounded outwards to whole tiles, that hold pairs to skip."""
    first = tl.minimum(tl.maximum(block * BM + skip, start), full)
    last = tl.minimum(tl.maximum(block * BM + BM + skip, start), full)
    return start + (first - start) // BN * BN, start + (last - start + BN - 1) // BN * BN


@triton.jit
def fused_pairs(
    x_ptr, columns_ptr, gradient_ptr, total_ptr, n, m, d, offset, scale, order, skip, share,
    row_value, row_gradient, column_value, column_gradient,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr,
    SKIP: tl.constexpr, GRADIENT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """A block of BM rows against its share of the columns: row sums of the penalty and the rows' gradient."""
    block, part = tl.program_id(0), tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    dims = tl.arange(0, BD)
    q = load_rows(x_ptr, rows, dims, n, d, EVEN, True)
    accumulator = tl.zeros((BM, BD), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    start = part * share
    end = tl.minimum(m, start + share)
    full = start + (end - start) // BN * BN  # columns beyond it are less than a tile
    first, last = full, full
    if SKIP:
        first, last = skipped_tiles(block, start, full, skip, BM, BN)
    accumulator, total = sweep_pairs(
        accumulator, total, q, rows, columns_ptr, start, first, n, m, d, offset, scale, order, skip,
        row_value, row_gradient, column_value, column_gradient,
        KIND, BY_ROW, BY_COLUMN, BN, BD, EVEN, False, GRADIENT, PRECISE,
    )  # fmt: skip
    if SKIP:
        accumulator, total = sweep_pairs(
            accumulator, total, q, rows, columns_ptr, first, last, n, m, d, offset, scale, order, skip,
            row_value, row_gradient, column_value, column_gradient,
            KIND, BY_ROW, BY_COLUMN, BN, BD, EVEN, True, GRADIENT, PRECISE,
        )  # fmt: skip
        accumulator, total = sweep_pairs(
            accumulator, total, q, rows, columns_ptr, last, full, n, m, d, offset, scale, order, skip,
            row_value, row_gradient, column_value, column_gradient,
            KIND, BY_ROW, BY_COLUMN, BN, BD, EVEN, False, GRADIENT, PRECISE,
        )  # fmt: skip
    accumulator, total = sweep_pairs(
        accumulator, total, q, rows, columns_ptr, full, end, n, m, d, offset, scale, order, skip,
        row_value, row_gradient, column_value, column_gradient,
        KIND, BY_ROW, BY_COLUMN, BN, BD, EVEN, True, GRADIENT, PRECISE,
    )  # fmt: skip
    if KIND != "softmax":
        tl.store(total_ptr + part.to(tl.int64) * n + rows, total, mask=rows < n)
    if GRADIENT:
        pointers = gradient_ptr + (part.to(tl.int64) * n + rows[:, None]) * d + dims[None, :]
        tl.store(pointers, accumulator * scale, mask=(rows[:, None] < n) & (dims[None, :] < d))


@triton.jit
def tile_products(
    x_ptr, columns_ptr, rows, columns, n, m, d,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Inner products of a tile of rows with a tile of columns, over d in steps of BK."""
    c = tl.zeros((BM, BN), tl.float32)
    inside_rows, inside_columns = rows[:, None] < n, columns[:, None] < m
    for start in range(0, d, BK):
        dims = start + tl.arange(0, BK)
        inside = dims[None, :] < d
        if EVEN:  # d is a multiple of BK
            q = tl.load(x_ptr + rows[:, None].to(tl.int64) * d + dims[None, :], mask=inside_rows, other=0.0)
            k = tl.load(columns_ptr + columns[:, None].to(tl.int64) * d + dims[None, :], mask=inside_columns, other=0.0)
        else:
            q = tl.load(x_ptr + rows[:, None].to(tl.int64) * d + dims[None, :], mask=inside_rows & inside, other=0.0)
            k = tl.load(
                columns_ptr + columns[:, None].to(tl.int64) * d + dims[None, :], mask=inside_columns & inside, other=0.0
            )
        c = multiply(q, tl.trans(k), c, PRECISE)
    return c


@triton.jit
def tile_weights(
    x_ptr, columns_ptr, weights_ptr, total_ptr, n, m, d, offset, scale, order, skip,
    row_value, row_gradient, column_value, column_gradient,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    SKIP: tl.constexpr, GRADIENT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Slopes of a (n, m) tile into a row-major buffer, and the sum of the penalty of each program's part of it."""
    program = tl.program_id(0)
    across, down = tl.cdiv(m, BN), tl.cdiv(n, BM)
    # neighbouring programs share rows and columns in the cache
    group = program // (GROUP * across)
    height = tl.minimum(down - group * GROUP, GROUP)
    block = group * GROUP + program % (GROUP * across) % height
    part = program % (GROUP * across) // height
    rows = block * BM + tl.arange(0, BM)
    columns = part * BN + tl.arange(0, BN)
    c = tile_products(x_ptr, columns_ptr, rows, columns, n, m, d, BM, BN, BK, EVEN, PRECISE)
    penalty, slope = weigh(
        offset + scale * c, rows, columns, n, m, order, row_value, row_gradient, column_value, column_gradient,
        KIND, BY_ROW, BY_COLUMN,
    )  # fmt: skip
    keep = (rows[:, None] < n) & (columns[None, :] < m)
    if SKIP:
        keep &= columns[None, :] != rows[:, None] + skip
    if KIND != "softmax":
        tl.store(total_ptr + program, tl.sum(tl.sum(tl.where(keep, penalty, 0.0), 1), 0))
    if GRADIENT:
        slope = tl.where(keep, slope, 0.0)
        pointers = weights_ptr + rows[:, None].to(tl.int64) * m + columns[None, :]
        inside = (rows[:, None] < n) & (columns[None, :] < m)
        tl.store(pointers, slope.to(weights_ptr.dtype.element_ty), mask=inside)


@triton.jit
def accumulate_product(
    weights_ptr, factor_ptr, out_ptr, block, part, n, m, d, gain,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """out += gain * weights factor for one tile of out, or with the weights transposed. weights: (n, m)."""
    length = m if TRANSPOSED else n  # rows of out
    depth = n if TRANSPOSED else m
    rows = block * BM + tl.arange(0, BM)
    dims = part * BN + tl.arange(0, BN)
    accumulator = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        inner = start + tl.arange(0, BK)
        if TRANSPOSED:
            pointers = weights_ptr + inner[:, None].to(tl.int64) * m + rows[None, :]
            w = tl.trans(tl.load(pointers, mask=(inner[:, None] < n) & (rows[None, :] < m), other=0.0))
        else:
            pointers = weights_ptr + rows[:, None].to(tl.int64) * m + inner[None, :]
            w = tl.load(pointers, mask=(rows[:, None] < n) & (inner[None, :] < m), other=0.0)
        pointers = factor_ptr + inner[:, None].to(tl.int64) * d + dims[None, :]
        k = tl.load(pointers, mask=(inner[:, None] < depth) & (dims[None, :] < d), other=0.0)
        accumulator = multiply(w, k, accumulator, PRECISE)
    pointers = out_ptr + rows[:, None].to(tl.int64) * d + dims[None, :]
    inside = (rows[:, None] < length) & (dims[None, :] < d)
    tl.store(pointers, tl.load(pointers, mask=inside, other=0.0) + gain * accumulator, mask=inside)


@triton.jit
def apply_weights(
    weights_ptr, x_ptr, columns_ptr, row_out_ptr, column_out_ptr, n, m, d, gain,
    BOTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """row_out += gain * weights columns and, if BOTH, column_out += gain * weights^T x. Each tile has one owner."""
    program = tl.program_id(0)
    across = tl.cdiv(d, BN)
    for_rows = tl.cdiv(n, BM) * across
    if program < for_rows:
        accumulate_product(
            weights_ptr, columns_ptr, row_out_ptr, program // across, program % across, n, m, d, gain,
            False, BM, BN, BK, PRECISE,
        )  # fmt: skip
    elif BOTH:
        program -= for_rows
        accumulate_product(
            weights_ptr, x_ptr, column_out_ptr, program // across, program % across, n, m, d, gain,
            True, BM, BN, BK, PRECISE,
        )  # fmt: skip


@triton.jit
def sweep_logsumexp(
    peak, total, x_ptr, columns_ptr, rows, low, high, n, m, d, scale, skip,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """Columns low..high into a running maximum and sum of exponentials of each row."""
    for j in range(low, high, BN):
        columns = j + tl.arange(0, BN)
        z = scale * tile_products(x_ptr, columns_ptr, rows, columns, n, m, d, BM, BN, BK, EVEN, PRECISE)
        if MASK:
            keep = (columns[None, :] < high) & (columns[None, :] != rows[:, None] + skip)
            z = tl.where(keep, z, -float("inf"))
        higher = tl.maximum(peak, tl.max(z, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # a row may have nothing in this tile
        total = total * tl.exp(peak - safe) + tl.sum(tl.exp(z - safe[:, None]), 1)
        peak = higher
    return peak, total


@triton.jit
def fused_logsumexp(
    x_ptr, columns_ptr, result_ptr, n, m, d, scale, skip, share,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, SKIP: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """A block of BM rows against its share of the columns: log sum_j exp(scale x_i.o_j)."""
    block, part = tl.program_id(0), tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    peak = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    start = part * share
    end = tl.minimum(m, start + share)
    full = start + (end - start) // BN * BN
    first, last = full, full
    if SKIP:
        first, last = skipped_tiles(block, start, full, skip, BM, BN)
    peak, total = sweep_logsumexp(
        peak, total, x_ptr, columns_ptr, rows, start, first, n, m, d, scale, skip, BM, BN, BK, EVEN, False, PRECISE
    )
    if SKIP:
        peak, total = sweep_logsumexp(
            peak, total, x_ptr, columns_ptr, rows, first, last, n, m, d, scale, skip, BM, BN, BK, EVEN, True, PRECISE
        )
        peak, total = sweep_logsumexp(
            peak, total, x_ptr, columns_ptr, rows, last, full, n, m, d, scale, skip, BM, BN, BK, EVEN, False, PRECISE
        )
    peak, total = sweep_logsumexp(
        peak, total, x_ptr, columns_ptr, rows, full, end, n, m, d, scale, skip, BM, BN, BK, EVEN, True, PRECISE
    )
    tl.store(result_ptr + part.to(tl.int64) * n + rows, peak + tl.log(total), mask=rows < n)
