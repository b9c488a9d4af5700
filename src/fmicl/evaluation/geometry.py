"""The geometry of embeddings: how close pairs are, how spread the cloud is, who is near whom.

Every function here measures and returns numbers; none of them keeps a graph. Embeddings are rows of an
(N, d) tensor of any float type on any device, and directions are all that count: rows are scaled to unit
length first, except in `effective_rank`, which is defined on the matrix as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fmicl.utils.numerics import exact_matmul, normalise

__all__ = [
    "Neighbours",
    "PairDistances",
    "alignment",
    "effective_rank",
    "nearest_neighbours",
    "pair_distances",
    "uniformity",
]

# A tile of similarities is at most _ROWS x _COLUMNS: 128 MiB on a CPU, where a matrix product of 512 rows
# already runs at full speed, and 512 MiB on an accelerator, which wants more rows at once.
_COLUMNS = 2**16
_ROWS_CPU = 512
_ROWS_ACCELERATOR = 2048


class Neighbours(NamedTuple):
    """The nearest rows to each query, nearest first."""

    similarities: Tensor
    """(Q, k) cosine similarities."""
    indices: Tensor
    """(Q, k) row numbers, int64."""


class PairDistances(NamedTuple):
    """Euclidean distances on the unit sphere, between 0 and 2, each sorted from small to large."""

    positive: Tensor
    """(N,) distances of the positive pairs."""
    negative: Tensor
    """(M,) distances of (a sample of) the negative pairs."""


def matrix(x: Tensor, name: str) -> Tensor:
    """Check that `x` is a finite, non-empty (N, d) tensor of floats, and give it in float32 or float64.

    Raises:
        ValueError: if it is not.
    """
    if x.ndim != 2 or x.shape[0] == 0 or x.shape[1] == 0:
        raise ValueError(f"{name} should be a non-empty (N, d) tensor with a row per sample; got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{name} should be of a float type; got {x.dtype}. Convert it with .float()")
    # The sum is finite only if every entry is, and needs no (N, d) mask; an overflow asks again, exactly.
    x = x.detach()
    x = x if x.dtype == torch.float64 else x.float()
    if not bool(x.sum().isfinite()) and not bool(x.isfinite().all()):
        bad = int((~x.isfinite().all(dim=1)).sum())
        raise ValueError(f"{name} has values that are not finite in {bad} of {x.shape[0]} rows")
    return x


def unit_rows(x: Tensor, name: str) -> Tensor:
    """`matrix`, with rows scaled to unit length; a row of zeros stays zero (similarity 0 to everything)."""
    return normalise(matrix(x, name))


def _pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape != y.shape:
        raise ValueError(f"x and y should be row-aligned pairs; got shapes {tuple(x.shape)} and {tuple(y.shape)}")
    return unit_rows(x, "x"), unit_rows(y, "y")


@torch.no_grad()
def alignment(x: Tensor, y: Tensor) -> float:
    r"""Mean squared distance of positive pairs, :math:`\frac1N \sum_i |x_i - y_i|^2` (Wang & Isola, 2020).

    Between 0 (the two views of a sample coincide) and 4 (they are opposite); lower is better.

    Args:
        x: (N, d) embeddings of the first views.
        y: (N, d) embeddings of the second views, row by row.

    Raises:
        ValueError: if the shapes differ, or an entry is not finite.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> alignment(x, x), alignment(x, -x), alignment(x, x.flip(0))
        (0.0, 4.0, 2.0)
    """
    x, y = _pair(x, y)
    return float((x - y).square().sum(dim=1).double().mean())


@torch.no_grad()
def uniformity(x: Tensor, t: float = 2.0) -> float:
    r"""Log of the mean Gaussian potential, :math:`\log \frac{2}{N(N-1)} \sum_{i<j} e^{-t|x_i - x_j|^2}`.

    Between 0 (every row is the same) and about -t * 2 (rows are far from each other; -4 for t = 2 is out of
    reach but near for a uniform cloud in many dimensions); lower is more uniform (Wang & Isola, 2020).
    All pairs count, tile by tile: time grows with N squared, memory with N.

    Args:
        x: (N, d) embeddings, N at least 2.
        t: sharpness of the potential, positive.

    Raises:
        ValueError: if there are fewer than 2 rows, t is not positive, or an entry is not finite.

    Example:
        >>> round(uniformity(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), 6)  # one pair at squared distance 2
        -4.0
        >>> abs(round(uniformity(torch.ones(5, 3)), 6))
        0.0
    """
    x = unit_rows(x, "x")
    n = x.shape[0]
    if n < 2:
        raise ValueError("uniformity needs at least 2 rows; got 1")
    if not t > 0:
        raise ValueError(f"t should be positive; got {t}")
    logs: list[Tensor] = []
    with exact_matmul(x.device):
        for start in range(0, n, _ROWS_CPU):
            rows = x[start : start + _ROWS_CPU]
            for left in range(start, n, _COLUMNS):
                # -t |x - y|^2 = 2 t (x.y - 1) on the sphere, without the diagonal and what lies below it.
                exponent = (rows @ x[left : left + _COLUMNS].T).sub_(1.0).clamp_max_(0.0).mul_(2.0 * t)
                if left == start:
                    square = exponent[:, : len(rows)]
                    square.masked_fill_(torch.ones_like(square, dtype=torch.bool).tril_(), -math.inf)
                logs.append(exponent.logsumexp(dim=1))
    return float(torch.cat(logs).cpu().double().logsumexp(dim=0)) - math.log(n * (n - 1) / 2)


@torch.no_grad()
def effective_rank(x: Tensor) -> float:
    r"""Effective number of dimensions that the rows of `x` use (Roy & Vetterli, 2007).

    .. math:: \exp\Big(-\sum_k p_k \log p_k\Big), \qquad p_k = \sigma_k / \sum_l \sigma_l,

    with :math:`\sigma` the singular values of `x` as it is: not centred, not normalised. 1 when all rows are
    multiples of one vector (collapse), min(N, d) when all directions are used alike.

    Args:
        x: (N, d) embeddings.

    Raises:
        ValueError: if every entry is zero, or an entry is not finite.

    Example:
        >>> round(effective_rank(torch.eye(4)), 6), round(effective_rank(torch.ones(10, 4)), 6)
        (4.0, 1.0)
    """
    x = matrix(x, "x")
    scale = x.abs().max()
    if not bool(scale > 0):
        raise ValueError("x is zero everywhere; its effective rank is not defined")
    # Singular values from the smaller Gram matrix in float64: an N x d decomposition would take many times
    # longer, and what float64 loses (singular values below 1e-8 of the largest) can't move the entropy.
    x = (x / scale).to("cpu" if x.device.type == "mps" else x.device)
    if x.shape[0] < x.shape[1]:
        x = x.T
    gram = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for part in torch.split(x, 2**14):
        gram += part.double().T @ part.double()
    squares = torch.linalg.eigvalsh(gram)
    floor = squares.max() * len(squares) * torch.finfo(squares.dtype).eps
    sigma = torch.where(squares > floor, squares, 0.0).sqrt()
    return float(torch.special.entr(sigma / sigma.sum()).sum().exp())


@torch.no_grad()
def pair_distances(x: Tensor, y: Tensor, *, max_negatives: int = 100_000, seed: int = 0) -> PairDistances:
    """Sorted distances of positive pairs (x_i, y_i) and of negative pairs (x_i, x_j), i != j.

    With at most `max_negatives` unordered negative pairs, all of them; otherwise a sample of that many,
    uniform with replacement, the same for the same seed.

    Args:
        x: (N, d) embeddings of the first views, N at least 2.
        y: (N, d) embeddings of the second views, row by row.
        max_negatives: number of negative pairs at most.
        seed: seed of the sample.

    Raises:
        ValueError: if the shapes differ, N is below 2, or an entry is not finite.

    Example:
        >>> x = torch.eye(3)
        >>> positive, negative = pair_distances(x, x)
        >>> positive.tolist(), [round(d, 4) for d in negative.tolist()]
        ([0.0, 0.0, 0.0], [1.4142, 1.4142, 1.4142])
    """
    x, y = _pair(x, y)
    n = x.shape[0]
    if n < 2:
        raise ValueError("pair_distances needs at least 2 rows to have a negative pair; got 1")
    if max_negatives < 1:
        raise ValueError(f"max_negatives should be at least 1; got {max_negatives}")
    if n * (n - 1) // 2 <= max_negatives:
        first, second = torch.triu_indices(n, n, offset=1)
    else:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(n, (max_negatives,), generator=generator)
        # A shift of 1 to n - 1 (mod n) never meets its own row, and all others are as likely.
        second = (first + torch.randint(1, n, (max_negatives,), generator=generator)) % n
    first, second = first.to(x.device), second.to(x.device)
    # From differences, not 2 - 2 x.y, which loses half the digits of a small distance; in chunks, for memory.
    negative = torch.cat(
        [(x[i] - x[j]).norm(dim=1) for i, j in zip(torch.split(first, 2**14), torch.split(second, 2**14), strict=True)]
    )
    return PairDistances((x - y).norm(dim=1).sort().values, negative.sort().values)


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row and their columns, in no particular order: exact, and faster than one topk.

    A row is seen as b interleaved strands, so that column c belongs to block c mod (n // b). The k blocks
    with the largest maxima hold the k largest values: were one of these elsewhere, its block's maximum would
    be below k others, each of them a larger value. So a scan for maxima, which runs at the speed of memory,
    and two selections over sqrt(n k) candidates take the place of a selection over n.
    """
    n = values.shape[1]
    strands = math.isqrt(n // k)
    if strands < 4:
        best = values.topk(k, dim=1, sorted=False)
        return best.values, best.indices
    blocks = n // strands
    grid = values[:, : strands * blocks].view(-1, strands, blocks)
    chosen = grid.amax(dim=1).topk(k, dim=1, sorted=False).indices
    candidates = grid.gather(2, chosen.unsqueeze(1).expand(-1, strands, -1)).flatten(1)
    rest = values[:, strands * blocks :]
    best = torch.cat([candidates, rest], dim=1).topk(k, dim=1, sorted=False)
    place = best.indices
    inside = chosen.gather(1, place % k) + place.div(k, rounding_mode="floor") * blocks
    outside = place - strands * k + strands * blocks
    return best.values, torch.where(place < strands * k, inside, outside)


def stream_neighbours(
    features: Tensor, queries: Tensor | None, k: int, *, chunk: int | None = None
) -> Iterator[tuple[slice, Neighbours]]:
    """`nearest_neighbours` piece by piece: the slice of queries, and their neighbours.

    For consumers that reduce (a vote, a count) and don't want (Q, k) results for all queries at once.
    """
    count = features.shape[0] - (queries is None)
    if not 1 <= k <= count:
        whom = "other rows" if queries is None else "rows"
        raise ValueError(f"k should be between 1 and the number of {whom} to choose from, {count}; got k={k}")
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk should be at least 1; got {chunk}")
    base = unit_rows(features, "features")
    query = base if queries is None else unit_rows(queries, "queries").to(base.device, base.dtype)
    if query.shape[1] != base.shape[1]:
        raise ValueError(f"queries have {query.shape[1]} dimensions, features {base.shape[1]}: they must agree")
    rows = chunk or (_ROWS_CPU if base.device.type == "cpu" else _ROWS_ACCELERATOR)
    rows = min(rows, query.shape[0])
    # One buffer for all tiles: fresh memory for each would cost the CPU as much as the product itself.
    buffer = base.new_empty(rows * min(_COLUMNS, base.shape[0]))
    for start in range(0, query.shape[0], rows):
        part = query[start : start + rows]
        found: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad(), exact_matmul(base.device):
            for left in range(0, base.shape[0], _COLUMNS):
                other = base[left : left + _COLUMNS]
                tile = buffer[: len(part) * len(other)].view(len(part), len(other))
                torch.mm(part, other.T, out=tile)
                if queries is None:  # a row must not find itself
                    first, last = max(start, left), min(start + len(part), left + len(other))
                    own = torch.arange(first, max(first, last), device=base.device)
                    tile[own - start, own - left] = -math.inf
                values, places = _largest(tile, min(k, len(other)))
                found.append((values, places + left))
        values = torch.cat([v for v, _ in found], dim=1)
        index = torch.cat([i for _, i in found], dim=1)
        best = values.topk(k, dim=1)
        yield slice(start, start + len(part)), Neighbours(best.values, index.gather(1, best.indices))


def nearest_neighbours(features: Tensor, queries: Tensor | None, k: int, *, chunk: int | None = None) -> Neighbours:
    """The k rows of `features` with the largest cosine similarity to each query, nearest first.

    Exact, and streaming: similarities exist for one tile of queries and features at a time. Which of several
    rows with equal similarity takes the last place is not defined.

    Args:
        features: (N, d) rows to choose from.
        queries: (Q, d) rows to find neighbours of; None stands for `features`, each row without itself.
        k: number of neighbours, at most N (N - 1 without queries).
        chunk: queries in one tile; None takes what suits the device.

    Raises:
        ValueError: if k is out of range, the dimensions differ, or an entry is not finite.

    Example:
        >>> compass = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]])
        >>> nearest_neighbours(compass, torch.tensor([[2.0, 5.0]]), k=2).indices
        tensor([[0, 1]])
    """
    parts = [found for _, found in stream_neighbours(features, queries, k, chunk=chunk)]
    return Neighbours(torch.cat([p.similarities for p in parts]), torch.cat([p.indices for p in parts]))
