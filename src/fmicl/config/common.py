"""Options that every run has, whatever it is trained on: method and objective by name, optimisation, machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fmicl.utils.options import Options, option


@dataclass(frozen=True)
class MethodChoice(Options):
    """The method, by its name in `fmicl.methods.METHODS`."""

    method: str = option("simclr", "Which embeddings are pairs, and which are negatives.")


@dataclass(frozen=True)
class ObjectiveChoice(Options):
    """The objective, by its name in `fmicl.losses.OBJECTIVES`."""

    objective: str = option("fmicl", "What is optimised.")


@dataclass(frozen=True)
class OptimisationOptions(Options):
    """Length of the run, batches, optimiser and schedule."""

    epochs: int = option(800, "Passes over the data.", above=0)
    batch_size: int = option(256, "Samples of a batch, over all processes together.", above=0)
    accumulate: int = option(1, "Batches whose gradients are accumulated for one step.", above=0)
    optimizer: Literal["sgd", "adamw", "lars"] = option(
        "sgd", "SGD with momentum 0.9, AdamW, or LARS: SGD with a rate of its own for each layer."
    )
    learning_rate: float = option(
        0.1, "Highest learning rate, reached after the warm-up; the schedule takes it to 0.", above=0
    )
    schedule: Literal["cosine", "linear"] = option("cosine", "Decay of the learning rate after the warm-up.")
    scale_learning_rate: bool = option(
        False, "Multiply the learning rate by the samples of a step (batch x accumulate) / 256."
    )
    weight_decay: float = option(1e-4, "Weight decay; biases and normalisation parameters have none.", at_least=0)
    warmup_epochs: float = option(10.0, "Epochs of linear warm-up; at most a fifth of all epochs.", at_least=0)
    clip: float = option(0.0, "Clip the norm of the gradient at this value (0: never).", at_least=0)
    seed: int = option(0, "Seed of every random number of the run.", at_least=0, below=2**63)

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after the warm-up."""
        scale = self.batch_size * self.accumulate / 256 if self.scale_learning_rate else 1.0
        return self.learning_rate * scale


@dataclass(frozen=True)
class MachineOptions(Options):
    """Where a run computes, in which precision, and how often it writes a checkpoint.

    Device, number of devices, precision and compilation change how numbers are rounded and how a batch is shared out:
    a run that is resumed with others ends with an encoder as good, but not with the same bits.
    """

    device: Literal["auto", "cpu", "cuda", "mps"] = option(
        "auto", "Where to train; auto takes a GPU if there is one.", role="machine"
    )
    devices: int = option(
        1, "Devices of this machine; under torchrun or SLURM their number comes from there.", role="machine", above=0
    )
    precision: Literal["auto", "32", "bf16"] = option(
        "auto", "auto: bf16 mixed precision on a GPU that supports it, else 32 bit.", role="rounding"
    )
    compile: Literal["auto", "on", "off"] = option("auto", "torch.compile; auto: on a GPU.", role="machine")
    checkpoint_minutes: float = option(
        10.0,
        "Longest time between two checkpoints; epochs of a minute and more end with one anyway.",
        role="machine",
        above=0,
    )
    checkpoint_steps: int = option(
        0, "Also write a checkpoint every so many steps (0: no).", role="machine", at_least=0
    )
