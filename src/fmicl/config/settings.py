"""Settings that every training run has, whatever it is trained on: method, objective, optimisation and machine.

:class:`fmicl.config.recipes.Recipe` adds what images need, :class:`fmicl.config.text_recipes.TextRecipe` what sentences need. Nothing
in this file imports torch, so that ``fmicl --help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from fmicl.config.fields import require_known, require_types

Method = Literal["simclr", "moco", "mocov3"]
Objective = Literal["fmicl", "infonce", "align_uniform", "spectral"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run on images and a run on sentences have in common.

    Raises:
        ValueError: a number is out of its range, or two settings contradict each other. The message names the field.
    """

    kind: ClassVar[str]
    """What is trained on; settings.json says it, so that a run can be read back."""
    machine: ClassVar[frozenset[str]] = frozenset(
        {"device", "devices", "precision", "compile", "checkpoint_minutes", "checkpoint_steps"}
    )
    """Settings that may differ when a run is resumed: they say where it runs, not what it computes.

    Of these, device, devices, precision and compile do change how numbers are rounded and how a batch is shared out: a
    run that is resumed with others ends with an encoder as good, but not with the same bits. The rest change nothing.
    """
    paths: ClassVar[tuple[str, ...]] = ()
    """Fields that hold a path, or None."""
    automatic: ClassVar[dict[str, Any]] = {"key_statistics": "auto"}
    """Fields with a value that lets the run choose, and that value; :meth:`settled` says what is chosen."""

    # Method
    method: Method = "simclr"
    """Which embeddings are pairs, and who is a negative."""
    encoder_momentum: float = 0.99
    """How much of itself the momentum encoder keeps at a step. MoCo's own 0.999 is for runs of a million steps."""
    encoder_momentum_end: float | None = None
    """What that rises to by the end of the run, along half a cosine (None: 1 for mocov3; for moco it stays)."""
    key_statistics: Literal["auto", "batch", "past"] = "auto"
    """By which the momentum encoder normalises: those of the batch, or of the batches before (past), with which a key
    doesn't show what batch it is of. auto: past for moco --symmetric, where both networks see one batch, and by its
    statistics would learn in a long run to tell batches apart instead of samples."""
    queue: int = 4096
    """Negatives that moco keeps from past batches."""
    symmetric: bool = False
    """moco: each view is a query for the other's key, and both keys are enqueued (MoCo v2+). Twice the views go
    through each network, and the queue reaches back half as many batches."""

    # Objective
    objective: Objective = "fmicl"
    """What is optimised."""
    divergence: str = "kl"
    """Of fmicl: kl, js, pearson, squared_hellinger, jeffrey, tsallis, vlc, reverse_kl or neyman."""
    order: float = 3.0
    """Of tsallis, above 1; the paper takes 3."""
    alpha: float = 40.0
    """Weight of the negatives (fmicl)."""
    gamma: float = 1.0
    """Of the kernel exp(-gamma |x - y|^2) (fmicl); the cosine's temperature is 1 / (2 gamma)."""
    mu: float | Literal["normalised"] = 1.0
    """Scale of the density ratio (fmicl, spectral); normalised: the constant that makes it one."""
    similarity: Literal["gaussian", "cosine"] = "gaussian"
    """How close two embeddings are (fmicl)."""
    negatives: Literal["auto", "anchor", "both", "cross"] = "auto"
    """Other anchors, all other views of the pair, or other second views; auto: as the objective's paper (infonce: cross
    for mocov3). moco takes its queue instead."""
    shift: Literal["optimal"] | None = None
    """Maximise over the Donsker-Varadhan shift (fmicl)."""
    temperature: float = 0.2
    """Of infonce."""
    uniformity_gamma: float = 2.0
    """Of the kernel in the uniformity term (align_uniform): Wang and Isola's t, and their value."""
    uniformity_weight: float = 1.0
    """Weight of the uniformity term (align_uniform)."""

    # Optimisation
    epochs: int = 800
    """Passes over the data."""
    batch_size: int = 256
    """Samples of a batch, over all processes together."""
    accumulate: int = 1
    """Batches whose gradients make one step."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum 0.9, or AdamW."""
    learning_rate: float = 0.1
    """Highest learning rate, reached after the warm-up; the schedule takes it to 0."""
    schedule: Literal["cosine", "linear"] = "cosine"
    """How the learning rate falls after the warm-up: along half a cosine, or on a straight line."""
    scale_learning_rate: bool = False
    """Multiply the learning rate by the samples of a step (batch x accumulate) / 256."""
    weight_decay: float = 1e-4
    """Of weights; biases and normalisation parameters have none."""
    warmup_epochs: float = 10.0
    """Epochs in which the learning rate rises by the same amount each step, the first being one such amount; never
    more than a fifth of all."""
    clip: float = 0.0
    """Clip the norm of the gradient here (0: never)."""

    # Machine
    seed: int = 0
    """Every random number of the run follows from this one."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train; auto takes a GPU if there is one."""
    devices: int = 1
    """Devices on this machine; under torchrun or SLURM their number comes from there."""
    precision: Literal["auto", "32", "bf16"] = "auto"
    """auto: bf16 mixed precision on a GPU that has it, else 32 bit."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto: on a GPU."""
    checkpoint_minutes: float = 10.0
    """Longest time between two checkpoints; epochs of a minute and more end with one anyway."""
    checkpoint_steps: int = 0
    """Also write a checkpoint each so many steps (0: no)."""

    def __post_init__(self) -> None:
        """Refuse what can't be meant."""
        require_types(self)
        self._require_positive(
            "queue", "alpha", "gamma", "temperature", "uniformity_gamma", "uniformity_weight", "epochs", "batch_size",
            "accumulate", "learning_rate", "devices", "checkpoint_minutes",
        )  # fmt: skip
        if self.mu != "normalised":
            self._require_positive("mu")
        self._require_not_negative("weight_decay", "warmup_epochs", "clip", "checkpoint_steps")
        self._require_share("encoder_momentum", "encoder_momentum_end")
        if self.encoder_momentum_end is not None and self.encoder_momentum_end < self.encoder_momentum:
            raise ValueError(
                f"encoder_momentum_end must not be below encoder_momentum ({self.encoder_momentum}), but it is "
                f"{self.encoder_momentum_end}"
            )
        if not (math.isfinite(self.order) and self.order > 1):
            raise ValueError(f"order (of tsallis) must be above 1, but it is {self.order}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie between 0 and 2^63 - 1, but it is {self.seed}")

    def _require_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive, but it is {value}")

    def _require_not_negative(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must not be negative, but it is {value}")

    def _require_share(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in [0, 1], but it is {value}")

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after the warm-up; scaled by the samples of a step / 256 where the recipe says so."""
        scale = self.batch_size * self.accumulate / 256 if self.scale_learning_rate else 1.0
        return self.learning_rate * scale

    @property
    def statistics(self) -> Literal["batch", "past"]:
        """By which the momentum encoder normalises, settled.

        Example:
            >>> from fmicl.config.recipes import RECIPES
            >>> recipe = dataclasses.replace(RECIPES["digits"].recipe, method="moco")
            >>> recipe.statistics, dataclasses.replace(recipe, symmetric=True).statistics
            ('batch', 'past')
        """
        if self.key_statistics != "auto":
            return self.key_statistics
        return "past" if self.method == "moco" and self.symmetric else "batch"

    def settled(self) -> Self:
        """The same, with what a run chooses by itself as it is chosen."""
        return dataclasses.replace(self, key_statistics=self.statistics)

    def parts(self) -> dict[str, bool]:
        """Of each setting that not all objectives and methods have, whether it has a part in this run."""
        fmicl = self.objective == "fmicl"
        normalised = self.divergence == "kl" and self.shift == "optimal"  # then alpha and mu are constants
        return {
            "divergence": fmicl,
            "order": fmicl and self.divergence == "tsallis",
            "alpha": fmicl and not normalised,
            "gamma": fmicl,
            "mu": (fmicl and not normalised) or self.objective == "spectral",
            "similarity": fmicl,
            "shift": fmicl,
            "temperature": self.objective == "infonce",
            "uniformity_gamma": self.objective == "align_uniform",
            "uniformity_weight": self.objective == "align_uniform",
            "negatives": self.method != "moco",
            "queue": self.method == "moco",
            "symmetric": self.method == "moco",
            "encoder_momentum": self.method != "simclr",
            "encoder_momentum_end": self.method != "simclr",
            "key_statistics": self.method != "simclr",
        }

    def because(self) -> dict[str, str]:
        """Of settings whose part doesn't follow from objective and method alone, where they have none, in words."""
        if self.objective != "fmicl":
            return {}
        shifted = "in kl with the optimal shift"
        return {"alpha": shifted, "mu": shifted, "order": f"in divergence {self.divergence}"}

    def without_part(self, default: Self) -> list[str]:
        """Fields that differ from another recipe's and have no part in this one's objective and method.

        Example:
            >>> from fmicl.config.recipes import RECIPES
            >>> default = RECIPES["digits"].recipe
            >>> dataclasses.replace(default, temperature=0.1, queue=512).without_part(default)
            ['temperature', 'queue']
        """
        parts = self.parts().items()
        return [name for name, part in parts if not part and getattr(self, name) != getattr(default, name)]

    def differences(self, before: Settings) -> str:
        """In words, what a run with these settings computes otherwise than one with others; "" if nothing.

        Example:
            >>> from fmicl.config.recipes import RECIPES
            >>> recipe = RECIPES["digits"].recipe
            >>> dataclasses.replace(recipe, alpha=10.0, device="cpu", key_statistics="batch").differences(recipe)
            'alpha was 20.0, is now 10.0'
        """
        then, now = before.settled()._flat(), self.settled()._flat()
        others = [name for name in now if then.get(name) != now[name] and name not in self.machine]
        return "; ".join(f"{name} was {then.get(name)}, is now {now[name]}" for name in others)

    def _flat(self) -> dict[str, Any]:
        """Each setting by the name of its option: those of the views stand among the others."""
        settings = self.to_json()
        return {name: value for name, value in {**settings, **settings.get("views", {})}.items() if name != "views"}

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types; :meth:`from_json` is the way back.

        Example:
            >>> from fmicl.config.recipes import RECIPES, Recipe
            >>> recipe = RECIPES["digits"].recipe
            >>> Recipe.from_json(recipe.to_json()) == recipe
            True
        """
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> Self:
        """The recipe that :meth:`to_json` wrote.

        Raises:
            ValueError: fields that this version doesn't know.
        """
        require_known(cls, settings)
        if settings.get("encoder_momentum", 0.0) is None:  # which it was, for the default
            settings = {**settings, "encoder_momentum": cls.encoder_momentum}
        anchors = settings.get("objective") in ("fmicl", "align_uniform") and settings.get("method") == "mocov3"
        if anchors and "symmetric" not in settings and settings.get("negatives") == "auto":  # which was cross, before
            settings = {**settings, "negatives": "cross"}
        if settings.get("symmetric") and "key_statistics" not in settings:  # which were the batch's, before
            settings = {**settings, "key_statistics": "batch"}
        paths = {name: Path(value) for name in cls.paths if (value := settings.get(name)) is not None}
        return cls(**{**settings, **paths})


def _plain(value: Any) -> Any:
    """A value of a field as JSON has it."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "item"):  # a number of numpy's
        return value.item()
    return str(value) if isinstance(value, Path) else value
