"""Multinomial logistic regression by torch.optim.LBFGS: the solver of the linear probe, on any device.

What makes it fast is the preconditioner; an L-BFGS of our own was 1.1 to 1.2 times as fast (results/benchmarks).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

# Chunk sizes: samples on a CPU, logits on a GPU (128 MiB for any number of classes).
_ROWS_CPU = 2048
_LOGITS = 2**25


class LogisticRegression:
    r"""Minimises the mean cross-entropy of W x + b plus decay / 2 |W|^2, warm-started from the previous fit.

    For each class, the Hessian is bounded by S / 2 + decay, with S the covariance of the features (Boehning, 1992). In
    the eigenbasis of S the bound is diagonal, and its inverse root preconditions L-BFGS: features of real encoders are
    ill-conditioned, with a few strong directions and many weak ones.

    Args:
        features: (N, d) float32, centred, in the eigenbasis of their covariance (or nearly).
        labels: (N,) int64 from 0 to classes - 1.
        classes: number of classes.
        spectrum: (d,) eigenvalues of the covariance.
    """

    def __init__(self, features: Tensor, labels: Tensor, classes: int, spectrum: Tensor) -> None:
        self.features, self.labels, self.spectrum = features, labels, spectrum
        self.weight = features.new_zeros(classes, features.shape[1])
        self.bias = features.new_zeros(classes, 1)

    def fit(self, decay: float, max_iterations: int) -> bool:
        """Minimise from the current weights; returns whether it converged within the iteration limit."""
        scale = torch.cat([self.spectrum / 2 + decay, self.spectrum.new_tensor([0.5])]).rsqrt()
        parts = [self.weight.shape[1], 1]
        point = torch.cat([self.weight, self.bias], dim=1) / scale
        evaluations = 4 * max_iterations
        optimiser = torch.optim.LBFGS(
            [point], max_iter=max_iterations, max_eval=evaluations, tolerance_grad=1e-5, tolerance_change=1e-9,
            history_size=20, line_search_fn="strong_wolfe",
        )  # fmt: skip

        def closure() -> Tensor:
            weight, bias = (scale * point).split_with_sizes(parts, dim=1)
            loss, *gradients = self._objective(weight, bias, decay)
            point.grad = scale * torch.cat(gradients, dim=1)
            return loss

        optimiser.step(closure)  # type: ignore[no-untyped-call, unused-ignore]
        self.weight, self.bias = (scale * point).split_with_sizes(parts, dim=1)
        state = optimiser.state[point]
        return bool(state["n_iter"] < max_iterations and state["func_evals"] < evaluations)

    def logits(self, features: Tensor) -> Tensor:
        """Logits (Q, classes) of features (Q, d)."""
        return functional.linear(features, self.weight, self.bias.squeeze(1))

    def _objective(self, weight: Tensor, bias: Tensor, decay: float) -> tuple[Tensor, Tensor, Tensor]:
        """Loss and gradients with respect to weight and bias."""
        # Classes are rows throughout: with few classes, products and softmax are several times faster than in the usual
        # layout. On a CPU, a chunk of samples stays in the cache for both products.
        count = len(self.features)
        rows = _ROWS_CPU if weight.device.type == "cpu" else max(1, _LOGITS // len(weight))
        losses: list[Tensor] = []
        weight_gradient, bias_gradient = decay * weight, torch.zeros_like(bias)
        for start in range(0, count, rows):
            x, labels = self.features[start : start + rows], self.labels[start : start + rows].unsqueeze(0)
            logs = functional.log_softmax(torch.addmm(bias, weight, x.T), dim=0)
            losses.append(-logs.gather(0, labels).mean() * (len(x) / count))
            error = logs.exp_().scatter_add_(0, labels, logs.new_full((1, len(x)), -1.0))
            weight_gradient.addmm_(error, x, alpha=1.0 / count)
            bias_gradient += error.sum(dim=1, keepdim=True) / count
        loss = torch.stack([*losses, decay / 2 * weight.square().sum()]).sum()
        return loss, weight_gradient, bias_gradient
