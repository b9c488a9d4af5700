"""Triton kernels of batch normalisation with residual sum and ReLU: a pass reads and writes each tensor once.

A tensor of (N, H, W, C) in memory is a matrix (M, C) here, M = N H W. With

    mean_c, var_c over the M rows,   xhat = (x - mean) / sqrt(var + eps),   y = relu(w xhat + b + skip)

a training step takes four passes over memory: `moments` and `apply` forward, `slopes` and `apply_gradient` backward.
Each program reduces its own chunk of rows, and the last one to finish combines the chunks, always in the same order: no
sum is atomic, so the same input gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(pointer, at, there, WHOLE: tl.constexpr):
    """Values as float32; without a mask for WHOLE tiles, which allows wide loads."""
    if WHOLE:
        return tl.load(pointer + at).to(tl.float32)
    return tl.load(pointer + at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, at, value, there, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointer + at, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer + at, value.to(pointer.dtype.element_ty), mask=there)


@triton.jit
def _sampled(rows, there, columns, c, h, w, EVERY: tl.constexpr):
    """Offsets of rows (n, i, j) in a tensor with only every EVERYth i and j, and the mask of rows that are in it."""
    i, j = rows // w % h, rows % w
    here = (i % EVERY == 0) & (j % EVERY == 0)
    row = (rows // (h * w) * ((h + EVERY - 1) // EVERY) + i // EVERY) * ((w + EVERY - 1) // EVERY) + j // EVERY
    return row.to(tl.int64)[:, None] * c + columns[None, :], here[:, None] & there


@triton.jit
def _last_one(counters, place):
    """Whether all other programs of this place have stored their results; the last one resets the counter."""
    tl.debug_barrier()  # all threads of this program
    seen = tl.atomic_add(counters + place, 1, sem="acq_rel")
    last = seen == tl.num_programs(0) - 1
    if last:
        tl.atomic_xchg(counters + place, 0)
    return last


@triton.jit
def moments(
    x, partial, counters, mean, rstd, running_mean, running_var, batches, m, c, chunk, momentum, eps,
    PAST: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Mean and 1 / sqrt(var + eps) of each column; updates the running statistics and counts the batch.

    If PAST, mean and variance are the running statistics before this batch, except for batch 0; the caller then counts
    the batch.

    Each program stores mean and sum of squared deviations of its chunk of rows in partial[:, p, :], and the last one
    combines them (Chan et al., 1979). Sums are about the chunk's first row, so that a mean far from 0 costs no
    precision of the variance.
    """
    p, parts = tl.program_id(0), tl.num_programs(0)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = columns < c
    first = p * chunk
    last = tl.minimum(first + chunk, m)
    about = tl.load(x + first.to(tl.int64) * c + columns, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BM, BC), tl.float32)
    squares = tl.zeros((BM, BC), tl.float32)
    for start in tl.range(first, last, BM, num_stages=4):
        rows = start + tl.arange(0, BM)
        there = (rows < last)[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None] * c + columns[None, :]
        value = _load(x, at, there, WHOLE) - about[None, :]
        if not WHOLE:
            value = tl.where(there, value, 0.0)
        total += value
        squares += value * value
    n = (last - first).to(tl.float32)
    shift = tl.sum(total, axis=0) / n
    spread = tl.sum(squares, axis=0) - n * shift * shift
    tl.store(partial + p * c + columns, about + shift, mask=inside)
    tl.store(partial + (parts + p) * c + columns, tl.maximum(spread, 0.0), mask=inside)
    if _last_one(counters, tl.program_id(1)):
        _join_moments(
            partial, mean, rstd, running_mean, running_var, batches, columns, inside, m, c, chunk, parts, momentum, eps,
            PAST, BC, BP,
        )  # fmt: skip
        if not PAST and tl.program_id(1) == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _join_moments(
    partial, mean, rstd, running_mean, running_var, batches, columns, inside, m, c, chunk, parts, momentum, eps,
    PAST: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((BP, BC), tl.float32)
    for start in range(0, parts, BP):
        p = start + tl.arange(0, BP)
        there = (p < parts)[:, None] & inside[None, :]
        weight = tl.minimum(chunk, m - p * chunk).to(tl.float32)[:, None] / m
        at = p[:, None] * c + columns[None, :]
        total += weight * tl.load(partial + at, mask=there, other=0.0, cache_modifier=".cg")
    centre = tl.sum(total, axis=0)
    spread = tl.zeros((BP, BC), tl.float32)
    for start in range(0, parts, BP):
        p = start + tl.arange(0, BP)
        there = (p < parts)[:, None] & inside[None, :]
        weight = tl.minimum(chunk, m - p * chunk).to(tl.float32)[:, None]
        at = p[:, None] * c + columns[None, :]
        off = tl.load(partial + at, mask=there, other=0.0, cache_modifier=".cg") - centre[None, :]
        own = tl.load(partial + parts * c + at, mask=there, other=0.0, cache_modifier=".cg")
        spread += tl.where(there, own + weight * off * off, 0.0)
    squares = tl.sum(spread, axis=0)
    before = tl.load(running_mean + columns, mask=inside, other=0.0)
    spread_before = tl.load(running_var + columns, mask=inside, other=0.0)
    variance = squares / (m - 1)
    share = momentum
    if PAST:
        seen = tl.load(batches)
        share = tl.maximum(momentum, 1.0 / (seen + 1))
        tl.store(mean + columns, tl.where(seen == 0, centre, before), mask=inside)
        tl.store(rstd + columns, 1.0 / tl.sqrt(tl.where(seen == 0, variance, spread_before) + eps), mask=inside)
    else:
        tl.store(mean + columns, centre, mask=inside)
        tl.store(rstd + columns, 1.0 / tl.sqrt(squares / m + eps), mask=inside)
    tl.store(running_mean + columns, before + share * (centre - before), mask=inside)
    tl.store(running_var + columns, spread_before + share * (variance - spread_before), mask=inside)


@triton.jit(do_not_specialize=["h", "w"])
def apply(
    x, skip, y, sample, mean, rstd, weight, bias, m, c, h, w,
    SKIP: tl.constexpr, RELU: tl.constexpr, EVERY: tl.constexpr,
    WHOLE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """y = relu(w xhat + b + skip); if EVERY > 1, also a copy of every EVERYth pixel.

    From the last rows to the first: the last ones were read last, and may still be cached.
    """
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = columns < c
    there = (rows < m)[:, None] & inside[None, :]
    at = rows.to(tl.int64)[:, None] * c + columns[None, :]
    scale = tl.load(weight + columns, mask=inside, other=0.0) * tl.load(rstd + columns, mask=inside, other=0.0)
    shift = tl.load(bias + columns, mask=inside, other=0.0) - tl.load(mean + columns, mask=inside, other=0.0) * scale
    value = _load(x, at, there, WHOLE) * scale[None, :] + shift[None, :]
    if SKIP:
        value += _load(skip, at, there, WHOLE)
    if RELU:
        value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)  # a ReLU must not hide NaN
    _store(y, at, value, there, WHOLE)
    if EVERY > 1:
        at, there = _sampled(rows, there, columns, c, h, w, EVERY)
        _store(sample, at, value, there, False)


@triton.jit
def _incoming(
    one, two, y, value, scale, shift, rows, columns, at, there, c, h, w,
    TWO: tl.constexpr, RELU: tl.constexpr, KEPT: tl.constexpr, EVERY: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Gradient at the input of the ReLU: the sum over one or two users of y, where y > 0."""
    g = _load(one, at, there, WHOLE)
    if TWO:
        if EVERY > 1:
            at_two, there_two = _sampled(rows, there, columns, c, h, w, EVERY)
            g += _load(two, at_two, there_two, False)
        else:
            g += _load(two, at, there, WHOLE)
    if RELU:
        if KEPT:  # with a residual, the sign of y doesn't follow from x
            positive = _load(y, at, there, WHOLE) > 0
        else:
            positive = value * scale[None, :] + shift[None, :] > 0
        g = tl.where(positive, g, 0.0)
    return g


@triton.jit(do_not_specialize=["h", "w"])
def slopes(
    one, two, x, y, sent, mean, rstd, weight, bias, partial, counters, grad_bias, grad_weight, m, c, h, w, chunk,
    TWO: tl.constexpr, RELU: tl.constexpr, KEPT: tl.constexpr, SENT: tl.constexpr, EVERY: tl.constexpr,
    WHOLE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Sums of g and of g xhat, the gradients of bias and weight; g is stored if a residual branch needs it (SENT).

    Each program stores the sums of its chunk of rows, and the last one adds them.
    """
    p, parts = tl.program_id(0), tl.num_programs(0)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = columns < c
    first = p * chunk
    last = tl.minimum(first + chunk, m)
    centre = tl.load(mean + columns, mask=inside, other=0.0)
    factor = tl.load(rstd + columns, mask=inside, other=0.0)
    scale = tl.load(weight + columns, mask=inside, other=0.0) * factor
    shift = tl.load(bias + columns, mask=inside, other=0.0) - centre * scale
    total = tl.zeros((BM, BC), tl.float32)
    product = tl.zeros((BM, BC), tl.float32)
    for start in tl.range(first, last, BM, num_stages=4):
        rows = start + tl.arange(0, BM)
        there = (rows < last)[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None] * c + columns[None, :]
        value = _load(x, at, there, WHOLE)
        g = _incoming(
            one, two, y, value, scale, shift, rows, columns, at, there, c, h, w, TWO, RELU, KEPT, EVERY, WHOLE
        )
        if SENT:
            _store(sent, at, g, there, WHOLE)
        total += g
        product += g * (value - centre[None, :])
    tl.store(partial + p * c + columns, tl.sum(total, axis=0), mask=inside)
    tl.store(partial + (parts + p) * c + columns, tl.sum(product, axis=0) * factor, mask=inside)
    if _last_one(counters, tl.program_id(1)):
        every = tl.zeros((BP, BC), tl.float32)
        every_product = tl.zeros((BP, BC), tl.float32)
        for start in range(0, parts, BP):
            q = start + tl.arange(0, BP)
            known = (q < parts)[:, None] & inside[None, :]
            at = q[:, None] * c + columns[None, :]
            every += tl.load(partial + at, mask=known, other=0.0, cache_modifier=".cg")
            every_product += tl.load(partial + parts * c + at, mask=known, other=0.0, cache_modifier=".cg")
        tl.store(grad_bias + columns, tl.sum(every, axis=0), mask=inside)
        tl.store(grad_weight + columns, tl.sum(every_product, axis=0), mask=inside)


@triton.jit(do_not_specialize=["h", "w"])
def apply_gradient(
    one, two, x, grad, mean, rstd, weight, bias, grad_bias, grad_weight, m, c, h, w,
    TWO: tl.constexpr, RELU: tl.constexpr, EVERY: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx = w rstd (g - mean(g) - xhat mean(g xhat))."""
    rows = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = columns < c
    there = (rows < m)[:, None] & inside[None, :]
    at = rows.to(tl.int64)[:, None] * c + columns[None, :]
    centre = tl.load(mean + columns, mask=inside, other=0.0)
    factor = tl.load(rstd + columns, mask=inside, other=0.0)
    scale = tl.load(weight + columns, mask=inside, other=0.0) * factor
    shift = tl.load(bias + columns, mask=inside, other=0.0) - centre * scale
    value = _load(x, at, there, WHOLE)
    g = _incoming(one, two, x, value, scale, shift, rows, columns, at, there, c, h, w, TWO, RELU, False, EVERY, WHOLE)
    level = tl.load(grad_bias + columns, mask=inside, other=0.0) / m
    slope = tl.load(grad_weight + columns, mask=inside, other=0.0) / m * factor
    result = scale[None, :] * (g - level[None, :] - (value - centre[None, :]) * slope[None, :])
    _store(grad, at, result, there, WHOLE)
