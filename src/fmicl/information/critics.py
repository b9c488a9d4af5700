r"""Critics: trainable functions s(x, y) whose optimum is the log density ratio of joint and independent pairs.

A critic maps rows x (N, D) and y (N, E) to N scores, and `all_pairs` maps x (N, D) and y (M, E) to (N, M). Separable
critics compute all pairs by one matrix product, which is why they can use every negative of a batch. Every critic is an
``nn.Module``; one of the user's needs only ``forward(x, y)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.information.gaussian import GaussianCopula
from fmicl.utils.registry import Registry


def mlp(inputs: int, hidden: int, outputs: int, layers: int = 2) -> nn.Sequential:
    """Layers of one width with SiLU between them.

    Example:
        >>> mlp(3, 8, 2)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """
    widths = [inputs, *[hidden] * layers]
    parts: list[nn.Module] = []
    for before, after in pairwise(widths):
        parts += [nn.Linear(before, after), nn.SiLU()]
    return nn.Sequential(*parts, nn.Linear(widths[-1], outputs))


class Encoder(nn.Module):
    """A network of the columns and of their root mean square.

    The length of a vector carries the dependence of elliptical distributions, such as Student's, and is hard to learn.

    Example:
        >>> Encoder(3, 8, 2)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.network = mlp(inputs + 1, hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Embeddings (N, outputs)."""
        embedding: Tensor = self.network(torch.cat([x, x.square().mean(dim=1, keepdim=True).sqrt()], dim=1))
        return embedding


class Critic(nn.Module):
    """A critic that may know a faster way to score all pairs, and a start from the training samples."""

    dense = False
    """Whether all pairs cost about as much as their embeddings, so that all of a batch serve as negatives."""

    def all_pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores (N, M) of every row of x with every row of y."""
        n, m = len(x), len(y)
        scores: Tensor = self(x.repeat_interleave(m, dim=0), y.repeat(n, *[1] * (y.dim() - 1)))
        return scores.view(n, m)

    def start(self, x: Tensor, y: Tensor) -> None:
        """Set parameters that the training samples determine; called once, before training."""

    def alternatives(self, x: Tensor, y: Tensor) -> tuple[Critic, ...]:  # noqa: ARG002
        """Critics to train after the start, the simplest first, of which a :class:`Stack` is made if it is better."""
        return (self,)


CRITICS: Registry[Callable[[int, int, int], Critic]] = Registry("critic")
"""Functions of the numbers of columns of x and y, and of the width of hidden layers."""


def list_critics(pattern: str = "*") -> list[str]:
    """Names of the critics that match a shell-style pattern.

    Example:
        >>> list_critics("j*")
        ['joint']
    """
    return CRITICS.names(pattern)


@CRITICS.register("separable", summary="Inner product of two networks, g(x) . h(y): all pairs by one matrix product.")
class SeparableCritic(Critic):
    r"""s(x, y) = g(x) . h(y) / sqrt(E) + a(x) + b(y), with networks g, h of E outputs.

    Example:
        >>> critic = SeparableCritic(3, 2, 16)
        >>> x, y = torch.randn(4, 3), torch.randn(4, 2)
        >>> torch.allclose(critic(x, y), critic.all_pairs(x, y).diagonal(), atol=1e-5)
        True
    """

    dense = True

    def __init__(self, x_columns: int, y_columns: int, hidden: int = 128, embedding: int = 32) -> None:
        super().__init__()
        self.x_network = Encoder(x_columns, hidden, embedding + 1)
        self.y_network = Encoder(y_columns, hidden, embedding + 1)
        self.scale = embedding**-0.5

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of the rows' pairs."""
        g, h = self.x_network(x), self.y_network(y)
        scores: Tensor = (g[:, :-1] * h[:, :-1]).sum(dim=1) * self.scale + g[:, -1] + h[:, -1]
        return scores

    def all_pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of all pairs."""
        g, h = self.x_network(x), self.y_network(y)
        scores: Tensor = g[:, :-1] @ h[:, :-1].T * self.scale + g[:, -1:] + h[:, -1]
        return scores


@CRITICS.register("bilinear", summary="x' W y + a'x + b'y + c: linear models, few samples.")
class BilinearCritic(Critic):
    """s(x, y) = x' W y + a'x + b'y + c; exact for the log ratio's cross terms of Gaussians.

    Example:
        >>> BilinearCritic(3, 2)(torch.ones(1, 3), torch.ones(1, 2)).tolist()
        [0.0]
    """

    dense = True

    def __init__(self, x_columns: int, y_columns: int, hidden: int = 0) -> None:  # noqa: ARG002 (has no hidden layer)
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(x_columns, y_columns))
        self.x_weight, self.y_weight = nn.Parameter(torch.zeros(x_columns)), nn.Parameter(torch.zeros(y_columns))
        self.bias = nn.Parameter(torch.zeros(()))
        self.unit = 10.0  # of the parameters: with the same learning rate, one layer moves slower than a deep network

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of the rows' pairs."""
        return self.unit * (((x @ self.weight) * y).sum(dim=1) + x @ self.x_weight + y @ self.y_weight + self.bias)

    def all_pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of all pairs."""
        return self.unit * (x @ self.weight @ y.T + (x @ self.x_weight).unsqueeze(1) + y @ self.y_weight + self.bias)


@CRITICS.register("gaussian", summary="The paper's similarity, log mu - gamma |g(x) - h(y)|^2 on the unit sphere.")
class GaussianKernelCritic(Critic):
    """s(x, y) = log mu - gamma |g(x) - h(y)|^2 of unit vectors, with trainable log mu and gamma > 0.

    The assumption of the paper (Assumption 4) with networks g and h in place of an encoder.

    Example:
        >>> critic = GaussianKernelCritic(3, 2, 16)
        >>> critic.all_pairs(torch.randn(4, 3), torch.randn(5, 2)).shape
        torch.Size([4, 5])
    """

    dense = True

    def __init__(self, x_columns: int, y_columns: int, hidden: int = 128, embedding: int = 32) -> None:
        super().__init__()
        self.x_network = Encoder(x_columns, hidden, embedding)
        self.y_network = Encoder(y_columns, hidden, embedding)
        self.log_mu = nn.Parameter(torch.tensor(1.0))
        self.log_gamma = nn.Parameter(torch.tensor(0.0))

    def _units(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.x_network(x), dim=1), F.normalize(self.y_network(y), dim=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of the rows' pairs."""
        g, h = self._units(x, y)
        return self.log_mu - self.log_gamma.exp() * (g - h).square().sum(dim=1)

    def all_pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of all pairs."""
        g, h = self._units(x, y)
        return self.log_mu - self.log_gamma.exp() * (2 - 2 * g @ h.T)


@CRITICS.register("joint", summary="One residual network of both, s([x, y]): any interaction, a pass for each pair.")
class JointCritic(Critic):
    """s(x, y) by one residual network of the concatenated columns and the root mean squares of x and of y.

    Example:
        >>> JointCritic(3, 2, 16)(torch.randn(4, 3), torch.randn(4, 2)).shape
        torch.Size([4])
    """

    def __init__(self, x_columns: int, y_columns: int, hidden: int = 128) -> None:
        super().__init__()
        self.first = nn.Linear(x_columns + y_columns + 2, hidden)
        self.block = nn.Sequential(nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.last = nn.Linear(hidden, 1)
        _shrink(self.last)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of the rows' pairs."""
        lengths = [z.square().mean(dim=1, keepdim=True).sqrt() for z in (x, y)]
        h = self.first(torch.cat([x, y, *lengths], dim=1))
        scores: Tensor = self.last(F.silu(h + self.block(h))).squeeze(1)
        return scores


def _shrink(layer: nn.Linear) -> None:
    """Start an output layer near 0, so that the scores are about those of independent variables."""
    with torch.no_grad():
        layer.weight.mul_(0.1)
        layer.bias.zero_()


class Stack(Critic):
    """A weighted mean of critics' scores; `fit` finds the weights, on samples that trained none of them (stacking).

    Weights are positive and add up to 1.

    Example:
        >>> stack = Stack([JointCritic(1, 1, 8), BilinearCritic(1, 1)])
        >>> stack.weights, stack(torch.zeros(4, 1), torch.zeros(4, 1)).shape
        (tensor([0.5000, 0.5000]), torch.Size([4]))
    """

    def __init__(self, critics: Sequence[Critic]) -> None:
        super().__init__()
        self.critics = nn.ModuleList(critics)
        self.weights: Tensor
        self.register_buffer("weights", torch.full((len(critics),), 1 / len(critics)))

    def each(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of each critic, (N, critics)."""
        return torch.stack([critic(x, y) for critic in self.critics], dim=1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of the rows' pairs."""
        return self.each(x, y) @ self.weights

    def fit(self, candidates: Tensor) -> None:
        """Maximise the mean of :func:`infonce_rows` over the weights.

        Args:
            candidates: (N, k + 1, critics), scores of each critic; the joint pair of each row first.
        """
        logits = torch.zeros(candidates.shape[-1]).to(candidates).requires_grad_()
        optimiser = torch.optim.LBFGS([logits], max_iter=50, line_search_fn="strong_wolfe")

        def step() -> Tensor:
            optimiser.zero_grad()
            loss = -infonce_rows(candidates @ logits.softmax(dim=0)).mean()
            loss.backward()
            return loss

        optimiser.step(step)
        self.weights.copy_(logits.detach().softmax(dim=0))


def infonce_rows(candidates: Tensor) -> Tensor:
    """s_i0 - log mean_j e^(s_ij) of scores (N, k + 1) with the joint pair first, whose mean is the InfoNCE bound."""
    return candidates[:, 0] - log_mean_exp(candidates, dim=1)


@CRITICS.register("copula", summary="Gaussian copula in closed form plus a separable network's correction.")
class CopulaCritic(Critic):
    r"""The log ratio of the Gaussian copula of the training samples, plus a correction that starts at 0.

    The Gaussian part needs no training; a network has to learn only what is not Gaussian after the columns are mapped
    to normal scores. The copula is that of the columns x, or of x and functions of its length, which carries the
    dependence of elliptical distributions and of rotations that vary with it:

    .. math:: w = \Big(\big(|x|^2 / D\big)^{1/3} - 1 + \tfrac{2}{9 D}\Big) \sqrt{9 D / 2}, \qquad
        (x), \; (x, w), \; (x, w x), \; (x, w x, w),

    where w is about standard normal if x is (Wilson and Hilferty, 1931). The first is taken unless another has a larger
    InfoNCE bound on a third of the training samples, by two standard errors; then it is fitted to all of them. If it is
    not the first, the networks of the correction see its canonical variables in place of the columns. The alternative
    is a :class:`JointCritic`, for what is far from any Gaussian copula, such as jumps.

    Example:
        >>> critic = CopulaCritic(1, 1, 16)
        >>> x = torch.randn(500, 1)
        >>> critic.start(x, x + torch.randn(500, 1))
        >>> critic.all_pairs(x[:3], x[:4]).shape
        torch.Size([3, 4])
    """

    dense = True

    def __init__(self, x_columns: int, y_columns: int, hidden: int = 128) -> None:
        super().__init__()
        self.correction = SeparableCritic(x_columns, y_columns, hidden)
        for network in (self.correction.x_network, self.correction.y_network):
            last = network.network[-1]
            assert isinstance(last, nn.Linear)
            _shrink(last)
        self.hidden = hidden
        self.copula: GaussianCopula | None = None
        self.features: Features = FEATURES[0]

    def start(self, x: Tensor, y: Tensor) -> None:
        """Choose and fit the copula."""
        held = max(2, len(x) // 3)
        found = []
        for features in FEATURES:
            parts = [length_features(z, features) for z in (x, y)]
            copula = GaussianCopula.fit(*(z[held:] for z in parts))
            found.append(_infonce_rows(copula, *(z[:held] for z in parts)))
        best = max(range(len(found)), key=lambda k: float(found[k].mean()))
        gain = found[best] - found[0]
        self.features = FEATURES[best if bool(gain.mean() > 2 * gain.std() / math.sqrt(held)) else 0]
        self.copula = GaussianCopula.fit(length_features(x, self.features), length_features(y, self.features))

    def alternatives(self, x: Tensor, y: Tensor) -> tuple[Critic, ...]:
        """This one, and a network of both variables without a copula."""
        return self, JointCritic(x.shape[1], y.shape[1], self.hidden).to(x.device)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of the rows' pairs."""
        copula, parts, inputs = self._inputs(x, y)
        scores: Tensor = copula.log_ratio(*parts) + self.correction(*inputs)
        return scores

    def all_pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """Scores of all pairs."""
        copula, parts, inputs = self._inputs(x, y)
        return copula.all_pairs(*parts) + self.correction.all_pairs(*inputs)

    def _inputs(self, x: Tensor, y: Tensor) -> tuple[GaussianCopula, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The copula, its columns, and those of the networks."""
        if self.copula is None:
            raise RuntimeError("start(x, y) comes before the first score")
        if self.features == FEATURES[0]:
            return self.copula, (x, y), (x, y)
        parts = length_features(x, self.features), length_features(y, self.features)
        a, b = self.copula.canonical(*parts)
        return self.copula, parts, (_with_columns(a, x.shape[1]), _with_columns(b, y.shape[1]))


def _with_columns(x: Tensor, columns: int) -> Tensor:
    """The first columns, or zeros after them."""
    return F.pad(x[:, :columns], (0, max(0, columns - x.shape[1])))


Features = tuple[bool, bool]
"""Whether a copula has the columns times the length, and the length itself."""
FEATURES: tuple[Features, ...] = ((False, False), (False, True), (True, False), (True, True))


def length_features(x: Tensor, features: Features) -> Tensor:
    """The columns (N, D), and those of :class:`CopulaCritic` that are asked for.

    Example:
        >>> length_features(torch.randn(100, 3), (True, True)).shape
        torch.Size([100, 7])
    """
    products, length = features
    if not (products or length):
        return x
    d = x.shape[1]
    w = (x.square().mean(dim=1, keepdim=True).pow(1 / 3) - 1 + 2 / (9 * d)) * math.sqrt(9 * d / 2)
    return torch.cat([x, *([w * x] if products else []), *([w] if length else [])], dim=1)


def _infonce_rows(copula: GaussianCopula, x: Tensor, y: Tensor) -> Tensor:
    """s_ii - log mean_j e^(s_ij) for each of N samples, which varies less than other bounds; -1e9 if it is infinite."""
    scores = copula.all_pairs(x, y).double()
    rows = scores.diagonal() - scores.logsumexp(dim=1) + math.log(len(x))
    return rows.nan_to_num(nan=-1e9, neginf=-1e9)


def log_mean_exp(values: Tensor, dim: int | None = None) -> Tensor:
    """log mean e^v over all entries, or over a dimension."""
    if dim is None:
        values, dim = values.flatten(), 0
    return values.logsumexp(dim=dim) - math.log(values.shape[dim])
