"""The LightningModule that trains a method: one step, its random seed, its learning rate, its CUDA graph."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fmicl.methods import Method
from fmicl.models.fast import CapturedStep, capture_graph, is_supported, optimise_head, optimise_resnet
from fmicl.training.optimisation import Optimisation, build_optimizer
from fmicl.utils.seeding import mix_seed, seed_device
from fmicl.utils.triton import triton_runs_on

if TYPE_CHECKING:
    from fmicl.data import Batch


class TrainingModule(LightningModule):
    """A method in training.

    The state of a run is that of the method and the optimiser, and the one number :attr:`batches`: learning rate,
    momentum and random numbers of a batch are functions of it. That is why a run that was interrupted ends with the
    same bits.

    Args:
        method: what is trained.
        optimisation: optimiser and schedule.

    Attributes:
        batches: batches up to now.
    """

    channels_last = False
    """Whether images are converted to the memory format that convolutions on a GPU prefer."""
    capture = False
    """Whether the step is captured as a CUDA graph at its first batch."""

    def __init__(self, method: Method, optimisation: Optimisation) -> None:
        super().__init__()
        self.method = method
        self.optimisation = optimisation
        self.batches = 0
        self._captured: CapturedStep | None = None
        self._inputs: tuple[str, ...] = ()
        self._names: tuple[str, ...] = ()
        self._second: Tensor | None = None

    @property
    def step(self) -> int:
        """Optimiser steps up to now."""
        return self.optimisation.step(self.batches)

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step."""
        return self.optimisation.rate(self.step)

    @property
    def progress(self) -> float:
        """Share of the run's steps that have been made."""
        return min(1.0, self.step / self.optimisation.total_steps)

    def synchronise_batchnorm(self) -> None:
        """Make batch normalisation take its statistics over all processes."""
        from timm.layers.norm_act import convert_sync_batchnorm

        # not torch's own, which drops the activation of timm's normalisations
        convert_sync_batchnorm(self.method)  # type: ignore[no-untyped-call]
        self.method.train(self.method.training)  # the new layers are all in training mode, frozen ones included

    def accelerate(self, device: torch.device, *, one_process: bool = True) -> None:
        """Compile the networks in place, so that names in checkpoints stay the same.

        A network that `fmicl.models.fast` supports gets its kernels and needs no compiler; others are compiled.

        Args:
            device: where training will be.
            one_process: whether one process trains. Several may share batch statistics, which these kernels don't.
        """
        encoder = self.method.encoder
        supported = one_process and triton_runs_on(device) and is_supported(encoder)
        supported &= all(parameter.requires_grad for parameter in encoder.parameters())  # statistics of frozen layers
        for network in self.method.networks():
            if not supported:
                network.compile()
            elif is_supported(network):
                optimise_resnet(network)
            else:
                optimise_head(network)
        self.capture = one_process and self.optimisation.accumulate == 1 and device.type == "cuda"

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:  # noqa: ARG002 (Lightning's name)
        """The loss of one batch, after setting what follows from the number of batches so far."""
        # Dropout and the like draw from here; a seed for each batch makes them the same after a resume.
        seed_device(mix_seed(self.optimisation.seed, self.batches, self.global_rank), self.device)
        if self.batches % self.optimisation.accumulate == 0:
            self.start_step()
        inputs = {name: x for name, x in batch._asdict().items() if x is not None and name != "index"}
        if self.channels_last:
            images = {name: x for name, x in inputs.items() if x.ndim == 4}
            inputs |= {name: x.contiguous(memory_format=torch.channels_last) for name, x in images.items()}
        self._inputs = tuple(inputs)
        tensors = self._loss(*inputs.values())
        values = dict(zip(self._names, tensors, strict=True))
        self._second = values["second"]
        self.batches += 1
        return values

    def start_step(self) -> None:
        """Before the first batch of an optimiser step: momentum encoder and learning rate."""
        self.method.start_step(self.progress)
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * group.get("factor", 1.0)

    def on_after_backward(self) -> None:
        """Let the method see the second embeddings: MoCo enqueues them."""
        assert self._second is not None
        self.method.after_backward(self._second)

    def _loss(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the comparison that aren't None: from the captured graph if there is one."""
        if not (self.capture and self.training):
            return self._eager_loss(*inputs)
        if self._captured is None:
            try:
                # the objective too, for its learned parameters
                parts: list[nn.Module] = [*self.method.networks(), self.method.objective]
                self._captured = capture_graph(self._eager_loss, parts, *inputs)
            except RuntimeError as error:  # a network that reads values on the host can't be captured
                self.capture = False
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"the step can't be captured as a CUDA graph, so it is slower: {reason}", stacklevel=2)
                return self._eager_loss(*inputs)
        return self._captured(*inputs)

    def _eager_loss(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        comparison = self.method.loss(**dict(zip(self._inputs, inputs, strict=True)))
        found = {name: x for name, x in comparison._asdict().items() if x is not None}
        self._names = tuple(found)
        return tuple(found.values())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimiser, with the learning rate that `start_step` sets."""
        return build_optimizer(self, self.optimisation)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002 (Lightning's names)
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,  # noqa: ARG002
    ) -> None:
        """Clip the norm of the gradient; Lightning's own way refuses fused optimisers."""
        if gradient_clip_val:
            nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def describe(self) -> str:
        """Method and objective with all settings, in one line."""
        method = self.method
        rotation = "" if method.rotation is None else f" and Rotation({method.rotation.extra_repr()})"
        objective = f"{type(method.objective).__name__}({method.objective.extra_repr()})"
        return f"{type(method).__name__} with {objective}{rotation}"
