"""Multinomial logistic regression to convergence, on any device, in few iterations: the probe's solver."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Logits in memory at a time: 128 MiB of them, whatever the number of samples and classes.
_LOGITS = 2**25


class LogisticRegression:
    r"""Minimises mean cross-entropy of W x + b plus decay / 2 |W|^2, warm-started from fit to fit.

    The Hessian never exceeds (S / 2 + decay) for each class, S being the covariance of the features
    (Boehning, 1992). In the eigenbasis of S that bound is diagonal, and dividing by its root before L-BFGS
    takes the ill condition of real features (a few strong directions, many faint ones) out of the problem.

    Args:
        features: (N, d) float32, centred, in coordinates where their covariance is (nearly) diagonal.
        labels: (N,) int64 from 0 to classes - 1.
        classes: number of classes.
        spectrum: (d,) the variances along these coordinates.
    """

    def __init__(self, features: Tensor, labels: Tensor, classes: int, spectrum: Tensor) -> None:
        self.features, self.labels, self.spectrum = features, labels, spectrum
        self.weight = features.new_zeros(features.shape[1], classes)
        self.bias = features.new_zeros(1, classes)

    def fit(self, decay: float, max_iterations: int) -> bool:
        """Minimise from where the weights are now; says whether that converged within the limit."""
        scale = torch.cat([self.spectrum / 2 + decay, self.spectrum.new_tensor([0.5])]).rsqrt().unsqueeze(1)
        point = torch.cat([self.weight, self.bias]) / scale
        optimiser = torch.optim.LBFGS(
            [point],
            max_iter=max_iterations,
            tolerance_grad=1e-5,
            tolerance_change=1e-9,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        @torch.no_grad()
        def closure() -> float:
            weight, bias = (scale * point).split_with_sizes([len(self.weight), 1])
            loss, weight_gradient, bias_gradient = self._objective(weight, bias, decay)
            point.grad = scale * torch.cat([weight_gradient, bias_gradient])
            return loss

        optimiser.step(closure)  # type: ignore[no-untyped-call, unused-ignore]
        self.weight, self.bias = (scale * point).split_with_sizes([len(self.weight), 1])
        state = optimiser.state[point]
        group = optimiser.param_groups[0]
        return bool(state["n_iter"] < group["max_iter"] and state["func_evals"] < group["max_eval"])

    def logits(self, features: Tensor) -> Tensor:
        """(Q, classes) logits of (Q, d) features."""
        return torch.addmm(self.bias, features, self.weight)

    def _objective(self, weight: Tensor, bias: Tensor, decay: float) -> tuple[float, Tensor, Tensor]:
        count, rows = len(self.features), max(1, _LOGITS // weight.shape[1])
        losses: list[Tensor] = []
        weight_gradient, bias_gradient = decay * weight, torch.zeros_like(bias)
        for start in range(0, count, rows):
            x, labels = self.features[start : start + rows], self.labels[start : start + rows]
            logs = functional.log_softmax(torch.addmm(bias, x, weight), dim=1)
            losses.append(-logs.gather(1, labels.unsqueeze(1)).mean() * (len(x) / count))
            error = logs.exp_()
            error.scatter_add_(1, labels.unsqueeze(1), error.new_full((len(x), 1), -1.0))
            weight_gradient.addmm_(x.T, error, alpha=1.0 / count)
            bias_gradient += error.sum(dim=0, keepdim=True) / count
        loss = torch.stack([*losses, decay / 2 * weight.square().sum()]).sum()
        return float(loss), weight_gradient, bias_gradient
