"""Triton kernels of whole losses of two views, launched by `fmicl.kernels.views`.

A loss and its gradient take five launches or fewer: `unit_views`, `view_logsumexp` (InfoNCE only), `view_pairs`,
`view_loss` and `view_gradient`. They exchange intermediate results through `scratch`, float32: the factors that
normalise the rows of x (N) and of y (N), the squared distances of the positive pairs (N), and then the partial results
of the sums over negatives.

Rows of both views are stored as one matrix, `units`, in the order that suits the negatives:

    anchor   x_1 ... x_N
    cross    x_1 ... x_N y_1 ... y_N
    both     x_1 y_1 ... x_N y_N

The pairs of small batches are summed here, in tiles that are read by pointers; larger batches take the kernels of
`fmicl.kernels.device` between `unit_views` and `view_loss`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fmicl.kernels.device import kept, leave_out, multiply, penalty_and_slope, total_of
from fmicl.kernels.positives_device import unit_row


@triton.jit(do_not_specialize=["samples", "stride", "shift"])
def unit_views(x, y, units, scratch, samples, d, width, stride, shift, Y: tl.constexpr, BD: tl.constexpr):
    """Unit rows of sample i: x in row i * stride of units, y (if Y) `shift` rows later; width - d columns are zero."""
    i = tl.program_id(0)
    k = tl.arange(0, BD)
    inside = k < d
    at = i.to(tl.int64) * d + k
    a, a_factor, a_zero = unit_row(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
    b, b_factor, b_zero = unit_row(tl.load(y + at, mask=inside, other=0.0).to(tl.float32))
    row = i.to(tl.int64) * stride
    tl.store(units + row * width + k, a.to(units.dtype.element_ty), mask=k < width)
    if Y:
        tl.store(units + (row + shift) * width + k, b.to(units.dtype.element_ty), mask=k < width)
    tl.store(scratch + i, a_factor)
    tl.store(scratch + samples + i, b_factor)
    tl.store(scratch + 2 * samples + i, tl.sum((a - b) * (a - b), axis=0) + a_zero + b_zero)


@triton.jit
def add_in_log2(a, b):
    """log2(2^a + 2^b)."""
    return tl.maximum(a, b) + tl.log2(1 + tl.exp2(-tl.abs(a - b)))


@triton.jit
def row_logsumexp(scratch, rows, n, samples, parts, PARTS: tl.constexpr):
    """log2 sum_j 2^z_ij of some rows, from the results of all parts of the columns."""
    results = scratch + 3 * samples
    if PARTS == 1:
        return tl.load(results + rows, mask=rows < n, other=0.0)
    else:
        part = tl.arange(0, PARTS)
        at = part[:, None].to(tl.int64) * n + rows[None, :]
        values = tl.load(results + at, mask=(part[:, None] < parts) & (rows[None, :] < n), other=-float("inf"))
        peak = tl.max(values, 0)
        safe = tl.where(peak == -float("inf"), 0.0, peak)
        return safe + tl.log2(tl.sum(tl.exp2(values - safe[None, :]), 0))


@triton.jit
def positive_logit(scratch, rows, n, samples, scale, PAIRED: tl.constexpr):
    """scale * x_i.y_i of the sample that a row belongs to."""
    sample = rows >> 1 if PAIRED else rows
    return scale - 0.5 * scale * tl.load(scratch + 2 * samples + sample, mask=rows < n, other=0.0)


@triton.jit
def normaliser(
    scratch, rows, n, samples, scale, parts, PARTS: tl.constexpr, PAIRED: tl.constexpr, DECOUPLED: tl.constexpr
):  # fmt: skip
    """log2 of the denominator of some rows: their negatives and, unless DECOUPLED, their positive."""
    others = row_logsumexp(scratch, rows, n, samples, parts, PARTS)
    if DECOUPLED:
        return others
    else:
        return add_in_log2(others, positive_logit(scratch, rows, n, samples, scale, PAIRED))


@triton.jit(do_not_specialize=["n", "samples", "parts"])
def view_normalisers(
    scratch, result, n, samples, scale, parts,
    POWER: tl.constexpr, PARTS: tl.constexpr, PAIRED: tl.constexpr, DECOUPLED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """log2 of the denominators of a block of rows, v, or with POWER 2^-v."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = normaliser(scratch, rows, n, samples, scale, parts, PARTS, PAIRED, DECOUPLED)
    if POWER:
        value = tl.exp2(-value)
    tl.store(result + rows, value, mask=rows < n)


@triton.jit
def load_rows(units, first, rows, n, start, width, BK: tl.constexpr):
    """Entries start ... start + BK of the rows first + rows of a side of n rows, zero beyond the ends."""
    dims = start + tl.arange(0, BK)
    at = (first + rows)[:, None].to(tl.int64) * width + dims[None, :]
    return tl.load(units + at, mask=(rows[:, None] < n) & (dims[None, :] < width), other=0.0)


@triton.jit
def products(
    units, first, rows, other, columns, n, width,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Inner products of the rows first + rows with the columns other + columns, in steps of BK entries."""
    c = tl.zeros((BM, BN), tl.float32)
    for start in range(0, width, BK):
        a = load_rows(units, first, rows, n, start, width, BK)
        b = load_rows(units, other, columns, n, start, width, BK)
        c = multiply(a, tl.trans(b), c, PRECISE)
    return c


@triton.jit(do_not_specialize=["n", "samples", "share"])
def view_logsumexp(
    units, scratch, n, samples, width, scale, share,
    TWO_SIDED: tl.constexpr, PAIRED: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """log2 sum_j 2^(scale x_i.o_j) of a block of rows over its share of the columns; TWO_SIDED: x against y."""
    block, part = tl.program_id(0), tl.program_id(1)
    rows = block * BM + tl.arange(0, BM)
    other = n if TWO_SIDED else 0
    q = load_rows(units, 0, rows, n, 0, width, BK) if HELD else rows
    peak = tl.full((BM,), -float("inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    start = part * share
    end = tl.minimum(n, start + share)
    for j in range(start, end, BN):
        columns = j + tl.arange(0, BN)
        if HELD:
            k = load_rows(units, other, columns, n, 0, width, BK)
            c = multiply(q, tl.trans(k), tl.zeros((BM, BN), tl.float32), PRECISE)
        else:
            c = products(units, 0, rows, other, columns, n, width, BM, BN, BK, PRECISE)
        z = scale * c
        z = tl.where((columns[None, :] < end) & kept(rows, columns, 0, PAIRED), z, -float("inf"))
        higher = tl.maximum(peak, tl.max(z, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # a row may have no pairs so far
        total = total * tl.exp2(peak - safe) + tl.sum(tl.exp2(z - safe[:, None]), 1)
        peak = higher
    results = scratch + 3 * samples + part.to(tl.int64) * n
    tl.store(results + rows, peak + tl.log2(total), mask=rows < n)


@triton.jit(do_not_specialize=["n", "samples", "share", "parts"])
def view_pairs(
    units, scratch, gradient, n, samples, width, offset, scale, order, gain, share, parts,
    KIND: tl.constexpr, TWO_SIDED: tl.constexpr, PAIRED: tl.constexpr, DECOUPLED: tl.constexpr,
    GRADIENT: tl.constexpr, PARTS: tl.constexpr, HELD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BD: tl.constexpr, PRECISE: tl.constexpr,
):  # fmt: skip
    """Sum of the penalties of a block of rows and its share of the columns, and gain * the gradient of these rows.

    A program computes BD entries of the gradient. If rows have more, others compute the same penalties again.

    TWO_SIDED: first the rows of x against y, then, if there are so many programs, those of y against x, whose penalties
    are the same ones. For KIND "softmax" there is no penalty, and the slopes are those of log-sum-exps; `scratch` holds
    their PARTS, at least as many as `parts` and a power of two.
    """
    program, part, slab = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks = tl.cdiv(n, BM)
    side = program // blocks
    rows = program % blocks * BM + tl.arange(0, BM)
    first = side * n
    other = n - first if TWO_SIDED else first
    q = load_rows(units, first, rows, n, 0, width, BK) if HELD else rows
    accumulator = tl.zeros((BM, BD), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    row_value = tl.zeros((BM,), tl.float32)
    if KIND == "softmax":
        row_value = normaliser(scratch, rows, n, samples, scale, parts, PARTS, PAIRED, DECOUPLED)
    start = part * share
    end = tl.minimum(n, start + share)
    for j in range(start, end, BN):
        columns = j + tl.arange(0, BN)
        if HELD:  # the columns serve both products
            k = load_rows(units, other, columns, n, 0, width, BK)
            c = multiply(q, tl.trans(k), tl.zeros((BM, BN), tl.float32), PRECISE)
        else:
            c = products(units, first, rows, other, columns, n, width, BM, BN, BK, PRECISE)
        z = offset + scale * c
        if KIND == "softmax":
            column_value = normaliser(scratch, columns, n, samples, scale, parts, PARTS, PAIRED, DECOUPLED)
            if TWO_SIDED:  # only the rows of x are anchors
                slope = tl.exp2(z - tl.where(side == 0, row_value[:, None], column_value[None, :]))
            else:
                slope = tl.exp2(z - row_value[:, None]) + tl.exp2(z - column_value[None, :])
            penalty = slope
        else:
            penalty, slope = penalty_and_slope(z, order, KIND)
        keep = (rows[:, None] < n) & (columns[None, :] < end) & kept(rows, columns, 0, PAIRED)
        z, penalty, slope = leave_out(z, penalty, slope, keep, KIND)
        if KIND != "softmax":
            total += total_of(penalty, z, KIND)
        if GRADIENT:
            if not HELD:
                k = load_rows(units, other, columns, n, slab * BD, width, BD)
            accumulator = multiply(slope.to(k.dtype), k, accumulator, PRECISE)
    if KIND != "softmax":
        if (side == 0) & (slab == 0):
            tl.store(scratch + 3 * samples + part * blocks + program, tl.sum(total, 0))
    if GRADIENT:
        dims = slab * BD + tl.arange(0, BD)
        sides = tl.num_programs(0) // blocks
        at = (part.to(tl.int64) * sides * n + first + rows[:, None]) * width + dims[None, :]
        tl.store(gradient + at, gain * accumulator, mask=(rows[:, None] < n) & (dims[None, :] < width))


@triton.jit
def score(r, linear, gain, power, KIND: tl.constexpr):
    """Score of a positive pair, up to a constant, for a KIND of `lowering.lower_score`."""
    if KIND == "js":
        return tl.minimum(r, 0) - tl.log(1 + tl.exp(-tl.abs(r)))
    elif KIND == "vlc":
        s = 1 / (1 + tl.exp(r))
        return -4 * s * s
    else:
        return linear * r + gain * tl.exp(power * r)


@triton.jit
def score_slope(r, linear, gain, power, KIND: tl.constexpr):
    """Its derivative."""
    e = tl.exp(-tl.abs(r))
    small = e / (1 + e)
    s = tl.where(r > 0, small, 1 - small)  # sigmoid(-r)
    if KIND == "js":
        return s
    elif KIND == "vlc":
        return 8 * s * s * tl.where(r > 0, 1 - small, small)
    else:
        return linear + gain * power * tl.exp(power * r)


@triton.jit(do_not_specialize=["samples", "n", "totals", "parts"])
def view_loss(
    scratch, result, samples, n, totals, weight, constant, offset, scale, linear, gain, power, parts,
    KIND: tl.constexpr, PAIRED: tl.constexpr, DECOUPLED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss, by one program: constant + weight * sum of the `totals` partial sums - mean score of the positives.

    r = offset - scale * distance. For KIND "softmax": the mean over n anchors of log(denominator) - positive logit.
    """
    rest = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    if KIND == "softmax":
        for start in range(0, n, BLOCK):
            rows = start + rest
            value = normaliser(scratch, rows, n, samples, scale, parts, PARTS, PAIRED, DECOUPLED)
            value -= positive_logit(scratch, rows, n, samples, scale, PAIRED)
            total += tl.where(rows < n, value, 0.0).to(tl.float64)
        loss = weight * tl.sum(total, 0)
    else:
        for start in range(0, totals, BLOCK):
            partial = tl.load(scratch + 3 * samples + start + rest, mask=start + rest < totals, other=0.0)
            total += weight * partial.to(tl.float64)
        for start in range(0, samples, BLOCK):
            inside = start + rest < samples
            distance = tl.load(scratch + 2 * samples + start + rest, mask=inside, other=0.0)
            value = score(offset - scale * distance, linear, gain, power, KIND)
            total -= tl.where(inside, value, 0.0).to(tl.float64) / samples
        loss = tl.sum(total, 0) + constant
    tl.store(result, loss.to(tl.float32))


@triton.jit
def positive_share(scratch, row, n, samples, scale, parts, PARTS: tl.constexpr, PAIRED: tl.constexpr):
    """1 minus the probability of a row's positive: the sigmoid of its negatives' logit minus its own."""
    rows = row + tl.arange(0, 1)
    others = row_logsumexp(scratch, rows, n, samples, parts, PARTS)
    difference = others - positive_logit(scratch, rows, n, samples, scale, PAIRED)
    return tl.sum(1 / (1 + tl.exp2(-difference)), 0)


@triton.jit
def summed_gradient(gradient, row, n, width, shares, k):
    """A row's gradient, the sum over the shares of the columns."""
    total = tl.zeros(k.shape, tl.float32)
    for share in range(0, shares):
        at = (share * n + row).to(tl.int64) * width + k
        total += tl.load(gradient + at, mask=k < width, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["upstream", "samples", "n", "stride", "shift", "gradient_rows", "shares", "parts"])
def view_gradient(
    x, y, scratch, x_by_pairs, y_by_pairs, upstream, x_gradient, y_gradient,
    samples, n, d, width, stride, shift, gradient_rows, shares, weight, offset, scale, linear, gain, power, parts,
    KIND: tl.constexpr, PAIRED: tl.constexpr, DECOUPLED: tl.constexpr, Y: tl.constexpr, PARTS: tl.constexpr,
    X_WANTED: tl.constexpr, Y_WANTED: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradient in the raw rows of sample i, times the upstream scalar.

    The unit row's gradient is that of the pairs, in row i * stride of x_by_pairs and (if Y) `shift` rows later in
    y_by_pairs, summed over shares, plus that of the distance, weight * d score / dr * d |x - y|^2. It is projected onto
    the tangent space and divided by the row's length.
    """
    i = tl.program_id(0)
    k = tl.arange(0, BD)
    inside = k < d
    at = i.to(tl.int64) * d + k
    a_factor, b_factor = tl.load(scratch + i), tl.load(scratch + samples + i)
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * a_factor
    b = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * b_factor
    if KIND == "softmax":
        anchors = 2 if PAIRED else 1
        if DECOUPLED:
            slope = weight * anchors
        else:
            slope = weight * positive_share(scratch, anchors * i, n, samples, scale, parts, PARTS, PAIRED)
            if PAIRED:
                slope += weight * positive_share(scratch, 2 * i + 1, n, samples, scale, parts, PARTS, PAIRED)
    else:
        distance = tl.load(scratch + 2 * samples + i)
        slope = weight * score_slope(offset - scale * distance, linear, gain, power, KIND)
    outer = tl.load(upstream).to(tl.float32)
    pull = 2 * slope * (a - b)
    if X_WANTED:
        g = summed_gradient(x_by_pairs, i * stride, gradient_rows, width, shares, k) + pull
        g = outer * a_factor * (g - a * tl.sum(a * g, axis=0))
        tl.store(x_gradient + at, g.to(x_gradient.dtype.element_ty), mask=inside)
    if Y_WANTED:
        h = -pull
        if Y:
            h += summed_gradient(y_by_pairs, i * stride + shift, gradient_rows, width, shares, k)
        h = outer * b_factor * (h - b * tl.sum(b * h, axis=0))
        tl.store(y_gradient + at, h.to(y_gradient.dtype.element_ty), mask=inside)
