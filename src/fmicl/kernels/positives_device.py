"""Triton kernels for positive pairs: normalisation and squared distances. A program reads one row of each view once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unit_row(row):
    """The row divided by its length, that factor, and 1 for a zero row, which stays zero, with factor 1."""
    largest = tl.max(tl.abs(row), axis=0)
    zero = tl.where(largest > 0, 0.0, 1.0)
    largest = tl.where(largest > 0, largest, 1.0)
    row = row / largest  # first, since squares of very small or large entries underflow or overflow
    length = tl.sqrt(tl.sum(row * row, axis=0))
    length = tl.where(length > 0, length, 1.0)
    return row / length, 1.0 / (largest * length), zero


@triton.jit
def normalise_pairs(x, y, x_out, y_out, factors, distances, n, d, BD: tl.constexpr):
    """Unit rows of x and y, their normalisation factors, and the squared distance of each pair; 2 for a zero row."""
    i = tl.program_id(0)
    k = tl.arange(0, BD)
    inside = k < d
    at = i.to(tl.int64) * d + k
    a, a_factor, a_zero = unit_row(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
    b, b_factor, b_zero = unit_row(tl.load(y + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(x_out + at, a, mask=inside)
    tl.store(y_out + at, b, mask=inside)
    tl.store(factors + i, a_factor)
    tl.store(factors + n + i, b_factor)
    tl.store(distances + i, tl.sum((a - b) * (a - b), axis=0) + a_zero + b_zero)


@triton.jit
def normalise_pairs_gradient(
    x, y, factors, by_x, by_y, by_distance, x_grad, y_grad, n, d,
    X: tl.constexpr, Y: tl.constexpr, DISTANCE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Gradients of the rows before normalisation: projected onto the tangent space and divided by the length."""
    i = tl.program_id(0)
    k = tl.arange(0, BD)
    inside = k < d
    at = i.to(tl.int64) * d + k
    a_factor, b_factor = tl.load(factors + i), tl.load(factors + n + i)
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * a_factor
    b = tl.load(y + at, mask=inside, other=0.0).to(tl.float32) * b_factor
    g = tl.zeros((BD,), tl.float32)
    h = tl.zeros((BD,), tl.float32)
    if X:
        g += tl.load(by_x + at, mask=inside, other=0.0).to(tl.float32)
    if Y:
        h += tl.load(by_y + at, mask=inside, other=0.0).to(tl.float32)
    if DISTANCE:
        slope = 2 * tl.load(by_distance + i) * (a - b)
        g += slope
        h -= slope
    tl.store(x_grad + at, (a_factor * (g - a * tl.sum(a * g, axis=0))).to(x_grad.dtype.element_ty), mask=inside)
    tl.store(y_grad + at, (b_factor * (h - b * tl.sum(b * h, axis=0))).to(y_grad.dtype.element_ty), mask=inside)


@triton.jit
def _difference(x, y, at, inside):
    a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    return a - tl.load(y + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def distances(x, y, result, d, BD: tl.constexpr):
    """Squared distance of each pair of rows."""
    i = tl.program_id(0)
    k = tl.arange(0, BD)
    difference = _difference(x, y, i.to(tl.int64) * d + k, k < d)
    tl.store(result + i, tl.sum(difference * difference, axis=0))


@triton.jit
def add_distance_gradient(total, x, y, by_distance, d, BD: tl.constexpr):
    """total += 2 by_distance (x - y), row by row."""
    i = tl.program_id(0)
    k = tl.arange(0, BD)
    inside = k < d
    at = i.to(tl.int64) * d + k
    old = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
    new = old + 2 * tl.load(by_distance + i) * _difference(x, y, at, inside)
    tl.store(total + at, new.to(total.dtype.element_ty), mask=inside)
