"""Geometry of embeddings: alignment, uniformity, effective rank, RankMe, LiDAR, pair distances, nearest neighbours.

Embeddings are the rows of an (N, d) tensor of any float type on any device. All functions except the ranks
(`effective_rank`, `rankme`, `lidar`) scale rows to unit length first. None computes gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fmicl.utils.numerics import exact_matmul, normalise
from fmicl.utils.validation import require_at_least_zero, require_positive

# Tiles of similarities are at most _ROWS x _COLUMNS: 128 MiB on a CPU, where a matrix product of 512 rows reaches full
# speed, and 512 MiB on a GPU, which needs more rows for that.
_COLUMNS = 2**16
_ROWS_CPU = 512
_ROWS_GPU = 2048


class Neighbours(NamedTuple):
    """Nearest rows of each query, nearest first: cosine similarities (Q, k) and row indices (Q, k)."""

    similarities: Tensor
    indices: Tensor


class PairDistances(NamedTuple):
    """Sorted Euclidean distances on the unit sphere (0 to 2): positive pairs (N,), sampled negative pairs (M,)."""

    positive: Tensor
    negative: Tensor


def check_matrix(x: Tensor, name: str) -> Tensor:
    """Detach x and convert it to float32 at least.

    Raises:
        ValueError: x is not a finite, non-empty (N, d) tensor of a float type.
    """
    if x.ndim != 2 or x.shape[0] == 0 or x.shape[1] == 0:
        raise ValueError(f"{name} must be a non-empty (N, d) tensor, got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{name} must have a float type, got {x.dtype}: convert it with .float()")
    # A finite sum proves that all entries are finite, without an (N, d) mask. It may overflow, hence the second check.
    x = x.detach()
    x = x if x.dtype == torch.float64 else x.float()
    if not bool(x.sum().isfinite()) and not bool(x.isfinite().all()):
        bad = int((~x.isfinite().all(dim=1)).sum())
        raise ValueError(f"{name} has non-finite values in {bad} of {x.shape[0]} rows")
    return x


def unit_rows(x: Tensor, name: str) -> Tensor:
    """:func:`check_matrix`, with rows scaled to unit length; a zero row stays zero (similarity 0 to everything)."""
    return normalise(check_matrix(x, name))


def _pair(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    if x.shape != y.shape:
        raise ValueError(f"x and y must have the same shape, got {tuple(x.shape)} and {tuple(y.shape)}")
    return unit_rows(x, "x"), unit_rows(y, "y")


@torch.no_grad()
def alignment(x: Tensor, y: Tensor) -> float:
    r"""Mean squared distance of positive pairs, :math:`\frac1N \sum_i |x_i - y_i|^2` (Wang & Isola, 2020).

    Between 0 (the two views of each sample coincide) and 4 (they are opposite); lower is better.

    Args:
        x: embeddings (N, d) of the first views.
        y: embeddings (N, d) of the second views.

    Raises:
        ValueError: the shapes differ, or an entry is not finite.

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

    Lower is more uniform (Wang & Isola, 2020): 0 if all rows are equal; a uniform distribution in many dimensions
    comes close to -2t. Computed over all pairs in tiles: time O(N^2), memory O(N).

    Args:
        x: embeddings (N, d), N at least 2.
        t: sharpness of the potential, positive.

    Raises:
        ValueError: there are fewer than 2 rows, t is not positive, or an entry is not finite.

    Example:
        >>> round(uniformity(torch.tensor([[1.0, 0.0], [0.0, 1.0]])), 6)  # one pair at squared distance 2
        -4.0
        >>> abs(round(uniformity(torch.ones(5, 3)), 6))
        0.0
    """
    x = unit_rows(x, "x")
    n = x.shape[0]
    if n < 2:
        raise ValueError("uniformity needs at least 2 rows, got 1")
    require_positive("t", t)
    logs: list[Tensor] = []
    with exact_matmul(x.device):
        for start in range(0, n, _ROWS_CPU):
            rows = x[start : start + _ROWS_CPU]
            for left in range(start, n, _COLUMNS):
                # -t |x - y|^2 = 2 t (x.y - 1) on the sphere; only pairs above the diagonal.
                exponent = (rows @ x[left : left + _COLUMNS].T).sub_(1.0).clamp_max_(0.0).mul_(2.0 * t)
                if left == start:
                    square = exponent[:, : len(rows)]
                    square.masked_fill_(torch.ones_like(square, dtype=torch.bool).tril_(), -math.inf)
                logs.append(exponent.logsumexp(dim=1))
    return float(torch.cat(logs).cpu().double().logsumexp(dim=0)) - math.log(n * (n - 1) / 2)


@torch.no_grad()
def effective_rank(x: Tensor) -> float:
    r"""Effective rank (Roy & Vetterli, 2007): how many dimensions the rows of x use.

    .. math:: \exp\Big(-\sum_k p_k \log p_k\Big), \qquad p_k = \sigma_k / \sum_l \sigma_l,

    with :math:`\sigma` the singular values of x, neither centred nor normalised. 1 if all rows are multiples of one
    vector (collapse), min(N, d) if all singular values are equal.

    Args:
        x: embeddings (N, d).

    Raises:
        ValueError: every entry is zero, or an entry is not finite.

    Example:
        >>> round(effective_rank(torch.eye(4)), 6), round(effective_rank(torch.ones(10, 4)), 6)
        (4.0, 1.0)
    """
    sigma = _singular_values(check_matrix(x, "x"))
    if not bool(sigma.any()):
        raise ValueError("the effective rank is not defined: every entry of x is zero")
    return float(torch.special.entr(sigma / sigma.sum()).sum().exp())


@torch.no_grad()
def rankme(x: Tensor, epsilon: float = 1e-7) -> float:
    r"""RankMe (Garrido et al., 2023): the effective rank with a small constant, a score without labels.

    .. math:: \exp\Big(-\sum_{k=1}^{\min(N, d)} p_k \log p_k\Big), \qquad
        p_k = \frac{\sigma_k}{\sum_l \sigma_l} + \epsilon,

    with :math:`\sigma` the singular values of x, neither centred nor normalised. Higher is better. The authors take the
    projection head's outputs of 25,600 training images: with rows of unit length it is `effective_rank`.

    Args:
        x: embeddings or features (N, d).
        epsilon: added to each share of a singular value.

    Returns:
        A value of about 1 to min(N, d); 0 if every entry is zero, as no dimension is used.

    Raises:
        ValueError: an entry is not finite, or epsilon is negative.

    Example:
        >>> round(rankme(torch.eye(4)), 5), round(rankme(torch.ones(10, 4)), 5), rankme(torch.zeros(10, 4))
        (4.0, 1.0, 0.0)
    """
    return _entropy_rank(_singular_values(check_matrix(x, "x")), epsilon)


@torch.no_grad()
def lidar(views: Tensor, delta: float = 1e-4, epsilon: float = 1e-7) -> float:
    r"""LiDAR (Thilak et al., 2024): the effective rank of a linear discriminant analysis whose classes are the samples.

    With N samples of q views each, :math:`\mu_i` the mean of a sample's views and :math:`\mu` the mean of all,

    .. math:: \Sigma_b = \frac1N \sum_i (\mu_i - \mu)(\mu_i - \mu)^T, \qquad
        \Sigma_w = \frac1{Nq} \sum_{ij} (x_{ij} - \mu_i)(x_{ij} - \mu_i)^T + \delta I,

    .. math:: \exp\Big(-\sum_k p_k \log p_k\Big), \qquad p_k = \frac{\lambda_k}{\sum_l \lambda_l} + \epsilon,

    with :math:`\lambda` the eigenvalues of :math:`\Sigma_w^{-1/2} \Sigma_b \Sigma_w^{-1/2}`. Directions in which views
    of one sample differ as much as samples do count little, unlike in RankMe. Higher is better. The authors take 1,000
    samples of 50 views.

    Args:
        views: embeddings or features (N, q, d) of q views of each of N samples, N and q at least 2.
        delta: regularises the covariance within samples, positive; so the scale of the embeddings matters. The
            covariance's rounding takes its place where that is larger.
        epsilon: added to each share of an eigenvalue.

    Returns:
        A value of about 1 to min(N - 1, d); 0 if all samples have the same mean.

    Raises:
        ValueError: the shape is another, an entry is not finite, or delta or epsilon is out of range.

    Example:
        >>> corners = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
        >>> round(lidar(corners.unsqueeze(1).repeat(1, 3, 1)), 5)
        2.0
        >>> lidar(torch.ones(4, 3, 2))
        0.0
    """
    if views.ndim != 3 or min(views.shape[:2]) < 2:
        raise ValueError(f"views must be (N, q, d) with N and q at least 2, got shape {tuple(views.shape)}")
    require_positive("delta", delta)
    n, q, d = views.shape
    rows = check_matrix(views.flatten(0, 1), "views")
    rounding = (torch.finfo(rows.dtype).eps * float(rows.abs().max())) ** 2
    rows = rows.to("cpu" if rows.device.type == "mps" else rows.device).double()
    means = rows.view(n, q, d).mean(dim=1)
    centred = means - means.mean(dim=0)
    if float(centred.square().mean()) <= rounding:
        return 0.0
    within = (rows.view(n, q, d) - means.unsqueeze(1)).flatten(0, 1)
    covariance = within.T @ within / (n * q)
    # entries above 1e6 have a rounding above delta
    covariance.diagonal().add_(max(delta, d * torch.finfo(covariance.dtype).eps * float(covariance.trace())))
    # L^-1 S_b L^-T has the eigenvalues of the symmetric form, and those of its smaller Gram matrix
    white = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), centred.T, upper=False)
    return _entropy_rank(_gram_eigenvalues(white).sort(descending=True).values[: n - 1], epsilon)


def _singular_values(x: Tensor) -> Tensor:
    """Singular values, up to a common factor, in float64; all zero if x is."""
    scale = x.abs().max()
    if not bool(scale > 0):
        return x.new_zeros(min(x.shape), dtype=torch.float64)
    return _gram_eigenvalues((x / scale).to("cpu" if x.device.type == "mps" else x.device)).sqrt()


def _gram_eigenvalues(x: Tensor) -> Tensor:
    """Squared singular values of x (N, d), min(N, d) of them, in float64.

    The eigenvalues of the smaller Gram matrix are much faster than a singular value decomposition. They lose singular
    values below 1e-8 of the largest, which don't affect an entropy.
    """
    if x.shape[0] < x.shape[1]:
        x = x.T
    gram = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float64)
    for part in torch.split(x, 2**14):
        gram += part.double().T @ part.double()
    squares = torch.linalg.eigvalsh(gram)
    floor = squares.max() * len(squares) * torch.finfo(squares.dtype).eps
    return torch.where(squares > floor, squares, 0.0)


def _entropy_rank(weights: Tensor, epsilon: float) -> float:
    """Exponential of the entropy of normalised weights plus epsilon; 0 without any weight."""
    require_at_least_zero("epsilon", epsilon)
    if not bool(weights.any()):
        return 0.0
    return float(torch.special.entr(weights / weights.sum() + epsilon).sum().exp())


@torch.no_grad()
def pair_distances(x: Tensor, y: Tensor, *, max_negatives: int = 100_000, seed: int = 0) -> PairDistances:
    """Sorted distances of positive pairs (x_i, y_i) and negative pairs (x_i, x_j), i != j.

    If there are more than `max_negatives` unordered negative pairs, that many are sampled uniformly with replacement.

    Args:
        x: embeddings (N, d) of the first views, N at least 2.
        y: embeddings (N, d) of the second views.
        max_negatives: maximum number of negative pairs.
        seed: seed of the sample.

    Raises:
        ValueError: the shapes differ, N is below 2, max_negatives below 1, or an entry is not finite.

    Example:
        >>> x = torch.eye(3)
        >>> positive, negative = pair_distances(x, x)
        >>> positive.tolist(), [round(d, 4) for d in negative.tolist()]
        ([0.0, 0.0, 0.0], [1.4142, 1.4142, 1.4142])
    """
    x, y = _pair(x, y)
    n = x.shape[0]
    if n < 2:
        raise ValueError("pair_distances needs at least 2 rows for a negative pair, got 1")
    require_positive("max_negatives", max_negatives)
    if n * (n - 1) // 2 <= max_negatives:
        first, second = torch.triu_indices(n, n, offset=1)
    else:
        generator = torch.Generator().manual_seed(seed)
        first = torch.randint(n, (max_negatives,), generator=generator)
        # A shift by 1 to n - 1 (mod n) reaches every other row with equal probability, and never the row itself.
        second = (first + torch.randint(1, n, (max_negatives,), generator=generator)) % n
    first, second = first.to(x.device), second.to(x.device)
    # From differences: 2 - 2 x.y loses half the digits of small distances. In chunks, to bound memory.
    negative = torch.cat(
        [(x[i] - x[j]).norm(dim=1) for i, j in zip(torch.split(first, 2**14), torch.split(second, 2**14), strict=True)]
    )
    return PairDistances((x - y).norm(dim=1).sort().values, negative.sort().values)


def _largest(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row and their columns, unordered: an exact topk that is faster for small k.

    The n columns are split into blocks of ``strands`` columns each (column c belongs to block c mod blocks). The k
    blocks with the largest maxima contain the k largest values: a value in any other block is at most that block's
    maximum, and so at most each of k other values. This replaces a selection among n values by a scan for maxima, which
    runs at memory bandwidth, and two selections among about sqrt(n k) candidates.
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
    index = best.indices
    inside = chosen.gather(1, index % k) + index.div(k, rounding_mode="floor") * blocks
    outside = index - strands * k + strands * blocks
    return best.values, torch.where(index < strands * k, inside, outside)


def stream_neighbours(features: Tensor, queries: Tensor | None, k: int) -> Iterator[Neighbours]:
    """:func:`nearest_neighbours` of one chunk of the queries after the other, for a vote or a count."""
    count = features.shape[0] - (queries is None)
    if not 1 <= k <= count:
        raise ValueError(f"k must lie between 1 and {count}, the number of candidates, got k={k}")
    base = unit_rows(features, "features")
    query = base if queries is None else unit_rows(queries, "queries").to(base.device, base.dtype)
    if query.shape[1] != base.shape[1]:
        raise ValueError(f"queries have {query.shape[1]} dimensions, features {base.shape[1]}")
    rows = min(_ROWS_CPU if base.device.type == "cpu" else _ROWS_GPU, query.shape[0])
    # One buffer for all tiles: on a CPU, allocating each anew costs as much as the product itself.
    buffer = base.new_empty(rows * min(_COLUMNS, base.shape[0]))
    for start in range(0, query.shape[0], rows):
        part = query[start : start + rows]
        found: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad(), exact_matmul(base.device):
            for left in range(0, base.shape[0], _COLUMNS):
                other = base[left : left + _COLUMNS]
                tile = buffer[: len(part) * len(other)].view(len(part), len(other))
                torch.mm(part, other.T, out=tile)
                if queries is None:  # exclude each row itself
                    first, last = max(start, left), min(start + len(part), left + len(other))
                    own = torch.arange(first, max(first, last), device=base.device)
                    tile[own - start, own - left] = -math.inf
                values, columns = _largest(tile, min(k, len(other)))
                found.append((values, columns + left))
        values = torch.cat([v for v, _ in found], dim=1)
        index = torch.cat([i for _, i in found], dim=1)
        best = values.topk(k, dim=1)
        yield Neighbours(best.values, index.gather(1, best.indices))


def nearest_neighbours(features: Tensor, queries: Tensor | None, k: int) -> Neighbours:
    """The k rows of `features` with the largest cosine similarity to each query, nearest first.

    Exact; similarities are computed in tiles. Among rows of equal similarity, which one is the k-th is undefined.

    Args:
        features: candidates (N, d).
        queries: (Q, d); None means the features themselves, each without itself.
        k: number of neighbours, at most N (N - 1 without queries).

    Raises:
        ValueError: k is out of range, the dimensions differ, or an entry is not finite.

    Example:
        >>> compass = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]])
        >>> nearest_neighbours(compass, torch.tensor([[2.0, 5.0]]), k=2).indices
        tensor([[0, 1]])
    """
    similarities, indices = zip(*stream_neighbours(features, queries, k), strict=True)
    return Neighbours(torch.cat(similarities), torch.cat(indices))
