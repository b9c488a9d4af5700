"""Triton kernels of the pairwise sums, launched by `fmicl.kernels.triton`.

Two algorithms, for two ranges of d:

- `fused_pairs` keeps the gradient of its rows in registers and passes once over all columns: z, loss, slopes and
  gradient of one tile after the other. Nothing of size N x N is written.
- `tile_weights` and `apply_weights` write the slopes of a large tile to a buffer that stays in the L2 cache, and
  multiply it from there: for d at which a block of rows and its gradient don't fit a multiprocessor.

Matrices are tensor descriptors, whose loads are pipelined and zero beyond the edges. Products accumulate in float32:
bfloat16 inputs use the tensor cores directly, float32 inputs three TF32 products.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reciprocal(u):
    """1 / u for u >= 1 by one instruction of the special-function unit; a division takes many."""
    root = tl.rsqrt(u)
    return root * root


@triton.jit
def log_lambert_w(s):
    """L with e^L + L = 1 + s by Newton's method from above, as in fmicl.divergences.special."""
    bound = tl.minimum(0.5 * s, s + 1)
    root = tl.where(s > 0, tl.minimum(bound, tl.log(1 + tl.maximum(s, 0))), bound)
    for _ in tl.static_range(8):
        e = tl.exp(root)
        root -= (root + e - 1 - s) / (1 + e)
    return root


@triton.jit
def penalty_and_slope(z, order, KIND: tl.constexpr):
    """Penalty and slope of a KIND of `lowering.lower`, up to the factors and constants that it returns.

    Kinds with exponentials take z in units of log 2, as the hardware has only exp2 and log2. The penalty of "js",
    log2(1 + 2^z), is returned without its logarithm, as the factor 1 + 2^-|z| of a product: see `total_of`. "js_below"
    and "vlc_below" are faster, and for z <= 0.
    """
    if KIND == "exp":
        e = tl.exp2(z)
        return e, e
    elif KIND == "linear":
        return z, tl.zeros_like(z) + 1
    elif KIND == "largest":
        return z, z
    elif KIND == "square":
        return z * z, 2 * z
    elif KIND == "js":
        e = tl.exp2(-tl.abs(z))
        s = reciprocal(1 + e)
        return 1 + e, tl.where(z >= 0, s, e * s)
    elif KIND == "jeffrey":
        e = tl.exp2(z)
        return e + 0.6931471805599453 * z, e + 1
    elif KIND == "skewed":  # sigmoid(z)^order
        e = tl.exp2(-tl.abs(z))
        large = reciprocal(1 + e)
        power = tl.exp2(order * (tl.minimum(z, 0) - tl.log2(1 + e)))
        return power, power * tl.where(z >= 0, e * large, large)
    elif KIND == "vlc":
        e = tl.exp2(-tl.abs(z))
        large = reciprocal(1 + e)
        small = e * large
        s, q = tl.where(z >= 0, small, large), tl.where(z >= 0, large, small)  # not 1 - s, which cancels
        return q * q, s * q * q
    elif KIND == "js_below":
        e = tl.exp2(z)
        return 1 + e, e * reciprocal(1 + e)
    elif KIND == "vlc_below":
        e = tl.exp2(z)
        s = reciprocal(1 + e)
        square = (e * s) * (e * s)
        return square, s * square
    # free critics with an unbounded domain: the conjugate itself
    elif KIND == "free_pearson":
        t = tl.maximum(z, -2, propagate_nan=tl.PropagateNan.ALL)
        return t * (0.25 * t + 1), 0.5 * t + 1
    elif KIND == "free_tsallis":
        base = tl.maximum(z * ((order - 1) / order), 0, propagate_nan=tl.PropagateNan.ALL)
        root = tl.where(base > 0, tl.exp2(tl.log2(tl.maximum(base, 1e-30)) / (order - 1)), 0.0)
        return base * root, root
    else:
        tl.static_assert(KIND == "free_jeffrey")
        root = log_lambert_w(-z)
        return tl.exp(-root) - root, tl.exp(-root)


@triton.jit
def shifted_penalty_and_slope(z, order, scalars, KIND: tl.constexpr):
    """Penalty and slope of a shifted KIND of `lowering.lower`, in whose units z is: see `fmicl.divergences.shifted`.

    The kinds that return a density ratio have no slope.
    """
    z -= tl.load(scalars)  # that of the closest pair
    z = tl.where(tl.abs(z) <= tl.load(scalars + 1), 0.0, z)
    e = tl.exp2(z)
    if KIND == "shifted_vlc" or KIND == "ratio_vlc":
        closest, far, near = tl.load(scalars + 2), tl.load(scalars + 3), tl.load(scalars + 4)
        s = 1 / (1 + closest * e)  # sigmoid(-z)
        less = s * near * (1 - e) * (s + far)  # s^2 less that of the closest pair
        rest = tl.maximum(tl.load(scalars + 6) - less, 0.0)
        s_v = tl.sqrt(tl.minimum(tl.load(scalars + 5) + less, 1.0))
        ratio = rest / ((1 + s_v) * s_v)
        if KIND == "ratio_vlc":
            return ratio, ratio
        return s_v * (4 * s_v - 8), 8 * ratio * s * s * (s * closest * e)
    elif KIND == "shifted_jeffrey" or KIND == "ratio_jeffrey":
        factor = tl.load(scalars + 2)
        root = log_lambert_w(0.6931471805599453 * z + factor * (e - 1) - tl.load(scalars + 3))
        ratio = tl.exp(-root)
        if KIND == "ratio_jeffrey":
            return ratio, ratio
        return ratio - root, ratio * (1 + factor * e)
    else:
        w = tl.load(scalars + 2) + tl.load(scalars + 3) * (e - 1)
        slope = tl.load(scalars + 4) * e
        if KIND == "shifted_js":
            ratio = 1 / w
            return 0.6931471805599453 * tl.log2(1 + ratio), slope * ratio / (1 + w)
        elif KIND == "shifted_log":
            return -0.6931471805599453 * tl.log2(w), slope / w
        else:
            tl.static_assert(KIND == "shifted_power")
            power = tl.where(w > 0, tl.exp2((order - 1) * tl.log2(tl.maximum(w, 1e-37))), 0.0)
            return tl.maximum(w, 0.0) * power, slope * power


@triton.jit
def times(a, b):
    """Product, for `tl.reduce`."""
    return a * b


@triton.jit
def total_of(penalty, z, KIND: tl.constexpr):
    """Sum of the penalties of each row of a tile.

    The kinds of JS take one logarithm of the product of all columns of a tile. Each factor lies between 1 and 2, so a
    product of 128 columns is infinite only at 2^128, where all factors are 2. The largest float replaces it, whose
    logarithm rounds to 128. (A minimum would hide NaN.)
    """
    if KIND == "js" or KIND == "js_below":
        tl.static_assert(penalty.shape[1] <= 128)
        product = tl.reduce(penalty, 1, times)
        product = tl.where(product == float("inf"), 3.4028234663852886e38, product)
        logarithm = tl.log2(product)
        if KIND == "js":
            logarithm += tl.sum(tl.maximum(z, 0), 1)
        return 0.6931471805599453 * logarithm
    else:
        return tl.sum(penalty, 1)


@triton.jit
def weigh(
    z, rows, columns, n, m, order, row_value, row_gradient, column_value, column_gradient,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """Penalties of a tile of z, and its slopes: the weights of the columns in the rows' gradient.

    For the softmax kinds the weights are those of log-sum-exps over rows and over columns, and there is no penalty:
    g_i 2^(z - v_i) + g_j 2^(z - v_j). "softmax" reads g 2^-v in place of v, and needs one power for both. The scalars
    of a shifted KIND come in place of row_value, with BY_ROW.
    """
    if KIND == "softmax":
        share = tl.zeros_like(z)
        if BY_ROW:
            share += tl.load(row_value + rows, mask=rows < n, other=0.0)[:, None]
        if BY_COLUMN:
            share += tl.load(column_value + columns, mask=columns < m, other=0.0)[None, :]
        weight = share * tl.exp2(z)
        return weight, weight
    elif KIND == "softmax_wide":
        weight = tl.zeros_like(z)
        if BY_ROW:
            value = tl.load(row_value + rows, mask=rows < n, other=0.0)
            gradient = tl.load(row_gradient + rows, mask=rows < n, other=0.0)
            weight += gradient[:, None] * tl.exp2(z - value[:, None])
        if BY_COLUMN:
            value = tl.load(column_value + columns, mask=columns < m, other=0.0)
            gradient = tl.load(column_gradient + columns, mask=columns < m, other=0.0)
            weight += gradient[None, :] * tl.exp2(z - value[None, :])
        return weight, weight
    elif BY_ROW:
        return shifted_penalty_and_slope(z, order, row_value, KIND)
    else:
        return penalty_and_slope(z, order, KIND)


@triton.jit
def leave_out(z, penalty, slope, keep, KIND: tl.constexpr):
    """Replace pairs that aren't kept by values that add nothing."""
    neutral = 1.0 if KIND == "js" or KIND == "js_below" else -float("inf") if KIND == "largest" else 0.0
    return tl.where(keep, z, 0.0), tl.where(keep, penalty, neutral), tl.where(keep, slope, 0.0)


@triton.jit
def multiply(a, b, accumulator, PRECISE: tl.constexpr):
    """accumulator + a b on the tensor cores."""
    if PRECISE:
        return tl.dot(a, b, accumulator, input_precision="tf32x3")
    else:
        return tl.dot(a, b, accumulator)


@triton.jit
def kept(rows, columns, skip, PAIRED: tl.constexpr):
    """Mask of the pairs to keep: all but j = i + skip; if PAIRED, both views of that sample are skipped."""
    if PAIRED:
        return (columns[None, :] >> 1) != ((rows[:, None] + skip) >> 1)
    else:
        return columns[None, :] != rows[:, None] + skip


@triton.jit
def tiles_to_mask(block, start, full, skip, BM: tl.constexpr, BN: tl.constexpr):
    """First and last column within start..full, rounded outwards to whole tiles, of the tiles with pairs to skip."""
    first = tl.minimum(tl.maximum(block * BM + skip, start), full)
    last = tl.minimum(tl.maximum(block * BM + BM + skip, start), full)
    return start + (first - start) // BN * BN, start + (last - start + BN - 1) // BN * BN


@triton.jit
def sweep_pairs(
    accumulator, total, q, rows, columns_desc, low, high, n, m, offset, scale, order, skip,
    row_value, row_gradient, column_value, column_gradient,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr,
    PAIRED: tl.constexpr, GRADIENT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Rows q with columns low..high; MASK for tiles with an edge or pairs to skip."""
    for j in range(low, high, BN):
        columns = j + tl.arange(0, BN)
        k = columns_desc.load([j, 0])
        c = multiply(q, tl.trans(k), tl.zeros((q.shape[0], BN), tl.float32), PRECISE)
        z = offset + scale * c
        penalty, slope = weigh(
            z, rows, columns, n, m, order, row_value, row_gradient, column_value, column_gradient,
            KIND, BY_ROW, BY_COLUMN,
        )  # fmt: skip
        if MASK:
            keep = (columns[None, :] < high) & kept(rows, columns, skip, PAIRED)
            z, penalty, slope = leave_out(z, penalty, slope, keep, KIND)
        if KIND == "largest":
            total = tl.maximum(total, tl.max(penalty, 1))
        elif (KIND != "softmax") & (KIND != "softmax_wide"):
            total += total_of(penalty, z, KIND)
        if GRADIENT:
            accumulator = multiply(slope.to(k.dtype), k, accumulator, PRECISE)
    return accumulator, total


@triton.jit(do_not_specialize=["skip"])
def fused_pairs(
    x_desc, columns_desc, gradient_ptr, total_ptr, n, m, d, offset, scale, order, weight, gain, skip, share,
    row_value, row_gradient, column_value, column_gradient,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    SKIP: tl.constexpr, PAIRED: tl.constexpr, GRADIENT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """A block of BM rows with its share of the columns: weight * row sums of the penalty, gain * gradient."""
    block, part = tl.program_id(0), tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    q = x_desc.load([block * BM, 0])
    accumulator = tl.zeros((BM, BD), tl.float32)
    total = tl.full((BM,), -float("inf") if KIND == "largest" else 0.0, tl.float32)
    start = part * share
    end = tl.minimum(m, start + share)
    full = start + (end - start) // BN * BN  # columns beyond it are a partial tile
    first, last = full, full
    if SKIP:
        first, last = tiles_to_mask(block, start, full, skip, BM, BN)
    accumulator, total = sweep_pairs(
        accumulator, total, q, rows, columns_desc, start, first, n, m, offset, scale, order, skip,
        row_value, row_gradient, column_value, column_gradient,
        KIND, BY_ROW, BY_COLUMN, BN, False, PAIRED, GRADIENT, PRECISE,
    )  # fmt: skip
    if SKIP:
        accumulator, total = sweep_pairs(
            accumulator, total, q, rows, columns_desc, first, last, n, m, offset, scale, order, skip,
            row_value, row_gradient, column_value, column_gradient,
            KIND, BY_ROW, BY_COLUMN, BN, True, PAIRED, GRADIENT, PRECISE,
        )  # fmt: skip
        accumulator, total = sweep_pairs(
            accumulator, total, q, rows, columns_desc, last, full, n, m, offset, scale, order, skip,
            row_value, row_gradient, column_value, column_gradient,
            KIND, BY_ROW, BY_COLUMN, BN, False, PAIRED, GRADIENT, PRECISE,
        )  # fmt: skip
    accumulator, total = sweep_pairs(
        accumulator, total, q, rows, columns_desc, full, end, n, m, offset, scale, order, skip,
        row_value, row_gradient, column_value, column_gradient,
        KIND, BY_ROW, BY_COLUMN, BN, True, PAIRED, GRADIENT, PRECISE,
    )  # fmt: skip
    if (KIND != "softmax") & (KIND != "softmax_wide"):
        tl.store(total_ptr + part.to(tl.int64) * n + rows, total * weight, mask=rows < n)
    if GRADIENT:
        dims = tl.arange(0, BD)
        pointers = gradient_ptr + (part.to(tl.int64) * n + rows[:, None]) * d + dims[None, :]
        tl.store(pointers, accumulator * gain, mask=(rows[:, None] < n) & (dims[None, :] < d))


@triton.jit
def tile_products(
    x_desc, columns_desc, row, column, d,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Inner products of BM rows with BN columns, over d in steps of BK."""
    c = tl.zeros((BM, BN), tl.float32)
    for start in range(0, d, BK):
        q = x_desc.load([row, start])
        k = columns_desc.load([column, start])
        c = multiply(q, tl.trans(k), c, PRECISE)
    return c


@triton.jit(do_not_specialize=["row0", "column0", "skip", "n", "m", "total0"])
def tile_weights(
    x_desc, columns_desc, weights_desc, total_ptr, total0, row0, column0, n, m, d, offset, scale, order, weight, skip,
    row_value, row_gradient, column_value, column_gradient,
    KIND: tl.constexpr, BY_ROW: tl.constexpr, BY_COLUMN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SIDE: tl.constexpr,
    PAIRED: tl.constexpr, GRADIENT: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Slopes of the tile of SIDE x SIDE pairs at (row0, column0) into a buffer, and weight * sums of the penalty."""
    program = tl.program_id(0)
    height_all = tl.cdiv(tl.minimum(n - row0, SIDE), BM)
    across = tl.cdiv(tl.minimum(m - column0, SIDE), BN)
    # grouped so that neighbouring programs share rows and columns in the cache
    group = program // (GROUP * across)
    height = tl.minimum(height_all - group * GROUP, GROUP)
    block = group * GROUP + program % (GROUP * across) % height
    part = program % (GROUP * across) // height
    row, column = row0 + block * BM, column0 + part * BN
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
    c = tile_products(x_desc, columns_desc, row, column, d, BM, BN, BK, PRECISE)
    z = offset + scale * c
    penalty, slope = weigh(
        z, rows, columns, n, m, order, row_value, row_gradient, column_value, column_gradient,
        KIND, BY_ROW, BY_COLUMN,
    )  # fmt: skip
    meets = (column < row + BM + skip) & (column + BN > row + skip)
    if meets | (row + BM > n) | (column + BN > m):
        keep = (rows[:, None] < n) & (columns[None, :] < m) & kept(rows, columns, skip, PAIRED)
        z, penalty, slope = leave_out(z, penalty, slope, keep, KIND)
    if KIND == "largest":
        tl.store(total_ptr + total0 + program, tl.max(penalty))
    elif (KIND != "softmax") & (KIND != "softmax_wide"):
        tl.store(total_ptr + total0 + program, weight * tl.sum(total_of(penalty, z, KIND), 0))
    if GRADIENT:
        weights_desc.store([block * BM, part * BN], slope.to(weights_desc.dtype))


@triton.jit
def accumulate_product(
    weights_desc, factor_desc, out_ptr, block, part, row0, length, factor0, depth, d, gain, fresh,
    TRANSPOSED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """out += gain * weights factor for one tile of out, with weights TRANSPOSED on request; out = ... if fresh."""
    accumulator = tl.zeros((BM, BN), tl.float32)
    for start in range(0, depth, BK):
        if TRANSPOSED:
            w = tl.trans(weights_desc.load([start, block * BM]))
        else:
            w = weights_desc.load([block * BM, start])
        k = factor_desc.load([factor0 + start, part * BN])
        accumulator = multiply(w, k, accumulator, PRECISE)
    local = block * BM + tl.arange(0, BM)
    dims = part * BN + tl.arange(0, BN)
    pointers = out_ptr + (row0 + local)[:, None].to(tl.int64) * d + dims[None, :]
    inside = (local[:, None] < length) & (dims[None, :] < d)
    old = tl.load(pointers, mask=inside & (local[:, None] < length * (1 - fresh)), other=0.0)
    tl.store(pointers, old + gain * accumulator, mask=inside)


@triton.jit(do_not_specialize=["row0", "column0", "n", "m", "row_fresh", "column_fresh"])
def apply_weights(
    weights_desc, transposed_desc, x_desc, columns_desc, row_out_ptr, column_out_ptr, row0, column0, n, m, d, gain,
    row_fresh, column_fresh,
    BOTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SIDE: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """row_out += gain * weights columns and, if BOTH, column_out += gain * weights^T x. Each tile has one owner."""
    program = tl.program_id(0)
    across = tl.cdiv(d, BN)
    height, width = tl.minimum(n - row0, SIDE), tl.minimum(m - column0, SIDE)
    for_rows = tl.cdiv(height, BM) * across
    if program < for_rows:
        accumulate_product(
            weights_desc, columns_desc, row_out_ptr, program // across, program % across,
            row0, height, column0, width, d, gain, row_fresh, False, BM, BN, BK, PRECISE,
        )  # fmt: skip
    elif BOTH:
        accumulate_product(
            transposed_desc, x_desc, column_out_ptr, (program - for_rows) // across, (program - for_rows) % across,
            column0, width, row0, height, d, gain, column_fresh, True, BM, BN, BK, PRECISE,
        )  # fmt: skip


@triton.jit
def sweep_logsumexp(
    peak, total, q, x_desc, columns_desc, row, rows, low, high, d, scale, skip,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HELD: tl.constexpr, MASK: tl.constexpr,
    PAIRED: tl.constexpr, MODERATE: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Add columns low..high to each row's sum of powers of two and, unless MODERATE, to its running maximum.

    q holds the rows if HELD.
    """
    for j in range(low, high, BN):
        if HELD:
            c = multiply(q, tl.trans(columns_desc.load([j, 0])), tl.zeros((BM, BN), tl.float32), PRECISE)
        else:
            c = tile_products(x_desc, columns_desc, row, j, d, BM, BN, BK, PRECISE)
        z = scale * c
        if MASK:
            columns = j + tl.arange(0, BN)
            keep = (columns[None, :] < high) & kept(rows, columns, skip, PAIRED)
            z = tl.where(keep, z, -float("inf"))
        if MODERATE:
            total += tl.sum(tl.exp2(z), 1)
        else:
            higher = tl.maximum(peak, tl.max(z, 1))
            safe = tl.where(higher == -float("inf"), 0.0, higher)  # a row may have no pairs so far
            total = total * tl.exp2(peak - safe) + tl.sum(tl.exp2(z - safe[:, None]), 1)
            peak = higher
    return peak, total


@triton.jit(do_not_specialize=["skip"])
def fused_logsumexp(
    x_desc, columns_desc, result_ptr, n, m, d, scale, skip, share, unit,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HELD: tl.constexpr, SKIP: tl.constexpr,
    PAIRED: tl.constexpr, MODERATE: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """A block of BM rows with its share of the columns: unit * log2 sum_j 2^(scale x_i.o_j).

    HELD rows are loaded once, with BK their whole depth. MODERATE powers need no maximum taken out.
    """
    block, part = tl.program_id(0), tl.program_id(1)
    row = block * BM
    rows = row + tl.arange(0, BM)
    q = x_desc.load([row, 0]) if HELD else rows
    peak = tl.full((BM,), 0.0 if MODERATE else -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    start = part * share
    end = tl.minimum(m, start + share)
    full = start + (end - start) // BN * BN
    first, last = full, full
    if SKIP:
        first, last = tiles_to_mask(block, start, full, skip, BM, BN)
    peak, total = sweep_logsumexp(
        peak, total, q, x_desc, columns_desc, row, rows, start, first, d, scale, skip,
        BM, BN, BK, HELD, False, PAIRED, MODERATE, PRECISE,
    )  # fmt: skip
    if SKIP:
        peak, total = sweep_logsumexp(
            peak, total, q, x_desc, columns_desc, row, rows, first, last, d, scale, skip,
            BM, BN, BK, HELD, True, PAIRED, MODERATE, PRECISE,
        )  # fmt: skip
        peak, total = sweep_logsumexp(
            peak, total, q, x_desc, columns_desc, row, rows, last, full, d, scale, skip,
            BM, BN, BK, HELD, False, PAIRED, MODERATE, PRECISE,
        )  # fmt: skip
    peak, total = sweep_logsumexp(
        peak, total, q, x_desc, columns_desc, row, rows, full, end, d, scale, skip,
        BM, BN, BK, HELD, True, PAIRED, MODERATE, PRECISE,
    )  # fmt: skip
    tl.store(result_ptr + part.to(tl.int64) * n + rows, unit * (peak + tl.log2(total)), mask=rows < n)
