"""Settings as data: what each recipe trains, on what, for how long.

A recipe is one frozen dataclass, and :data:`RECIPES` below reads like the paper's table of settings. The command
line (:mod:`fmicl.cli`) is derived from these classes: a field that is added here is an option there. Nothing in this
file imports torch, so that ``fmicl --help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from fmicl.views import CIFAR10_MEAN, CIFAR10_STD, IMAGENET_MEAN, IMAGENET_STD, STL10_MEAN, STL10_STD, Views

Method = Literal["simclr", "moco", "mocov3"]
Objective = Literal["fmicl", "infonce", "align_uniform", "spectral"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of one training run: objective x method x encoder x data, and how it is optimised.

    Raises:
        ValueError: a number is out of its range, or two settings contradict each other. The message names the field.

    Example:
        >>> recipe = dataclasses.replace(RECIPES["cifar10"].recipe, divergence="js", epochs=200)
        >>> recipe.encoder, recipe.batch_size, recipe.alpha
        ('resnet18', 512, 40.0)
    """

    # Data
    dataset: str
    """Which data: digits, cifar10, stl10, tinyimagenet, imagenet, or images (a folder of pictures)."""
    data_dir: Path | None = None
    """The folder that holds the data (digits needs none)."""
    download: bool = False
    """Fetch the data into --data-dir first, where torchvision offers it."""
    checksum: bool = True
    """Check that CIFAR-10 and STL-10 are the official files; without, a part of them will do."""
    memory_gib: float = 4.0
    """Folders of images up to this size, once resized, are held in memory; larger ones are decoded as they go."""
    validation: float = 0.0
    """Hold out this share of the labelled training data and evaluate on it, not on the test data: for tuning."""
    views: Views = field(default_factory=Views)
    """The random views of a sample."""
    second_blur: float | None = None
    """Probability of blur in the second view (None: as in the first)."""
    second_solarise: float | None = None
    """Probability of solarisation in the second view (None: as in the first)."""

    # Encoder
    encoder: str = "resnet18"
    """Any timm model, such as resnet50 or vit_small_patch16_224, or small_conv."""
    stem: Literal["auto", "small", "standard"] = "auto"
    """Of a ResNet: small is 3x3, stride 1, no max-pool (CIFAR); auto takes it for images of up to 64 pixels."""
    depth: int | None = None
    """Blocks of a vision transformer (None: as named)."""
    stable_vit: bool = True
    """MoCo v3's tricks for vision transformers: frozen patch projection, fixed sine-cosine positions."""
    hidden: int = 2048
    """Width of the hidden layers of the projection head."""
    dim: int = 512
    """Dimension d of the embeddings."""

    # Method
    method: Method = "simclr"
    """Which embeddings are pairs, and who is a negative."""
    encoder_momentum: float | None = None
    """Of the momentum encoder (None: 0.999 for moco; 0.99, rising to 1, for mocov3)."""
    queue: int = 4096
    """Negatives that moco keeps from past batches."""

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
    """Of the kernel exp(-gamma |x - y|^2) (fmicl, align_uniform); the cosine's temperature is 1 / (2 gamma)."""
    mu: float | Literal["normalised"] = 1.0
    """Scale of the density ratio (fmicl, spectral); normalised: the constant that makes it one."""
    similarity: Literal["gaussian", "cosine"] = "gaussian"
    """How close two embeddings are (fmicl)."""
    negatives: Literal["auto", "anchor", "both", "cross"] = "auto"
    """Other anchors, all other views, or other second views; auto: as the objective's paper; cross for mocov3.
    moco takes its queue instead."""
    shift: Literal["optimal"] | None = None
    """Maximise over the Donsker-Varadhan shift (fmicl)."""
    temperature: float = 0.2
    """Of infonce."""
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
    """Highest learning rate, reached after the warm-up; a cosine takes it to 0."""
    scale_learning_rate: bool = False
    """Multiply the learning rate by the samples of a step (batch x accumulate) / 256."""
    weight_decay: float = 1e-4
    """Of weights; biases and normalisation parameters have none."""
    warmup_epochs: float = 10.0
    """Epochs in which the learning rate rises by the same amount each step, the first being one such amount; never
    more than a fifth of all."""
    clip: float = 0.0
    """Clip the norm of the gradient here (0: never)."""

    # Evaluation
    k: int = 200
    """Neighbours in the k-NN classifier."""
    monitor_every: int = 10
    """Epochs between two k-NN evaluations in training (0: only at the end)."""
    baselines: bool = False
    """Evaluate raw pixels and the untrained encoder as well."""

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
    sync_batchnorm: bool = True
    """Batch normalisation over all GPUs together."""
    workers: int = 8
    """Processes that decode images, for data that doesn't fit into memory."""
    checkpoint_minutes: float = 10.0
    """Longest time between two checkpoints; epochs of half a minute and more end with one anyway."""
    checkpoint_steps: int = 0
    """Also write a checkpoint each so many steps (0: no)."""

    def __post_init__(self) -> None:
        """Refuse numbers that can't be meant."""
        positive = [
            "hidden",
            "dim",
            "queue",
            "alpha",
            "gamma",
            "temperature",
            "uniformity_weight",
            "epochs",
            "batch_size",
        ]
        positive += ["accumulate", "learning_rate", "k", "devices", "checkpoint_minutes"]
        if self.mu != "normalised":
            positive.append("mu")
        if self.depth is not None:
            positive.append("depth")
        for name in positive:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive, but it is {value}")
        for name in (
            "weight_decay",
            "warmup_epochs",
            "clip",
            "monitor_every",
            "workers",
            "checkpoint_steps",
            "memory_gib",
        ):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must not be negative, but it is {value}")
        for name in ("second_blur", "second_solarise", "encoder_momentum"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must lie in [0, 1], but it is {value}")
        if not (math.isfinite(self.order) and self.order > 1):
            raise ValueError(f"order (of tsallis) must be above 1, but it is {self.order}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie between 0 and 2^63 - 1, but it is {self.seed}")
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is a share of the training data, in [0, 1), but it is {self.validation}")

    @property
    def view_pair(self) -> tuple[Views, Views]:
        """The two families of views; they differ only for methods with asymmetric views (MoCo v3)."""
        first = self.views
        blur = first.blur if self.second_blur is None else self.second_blur
        solarise = first.solarise if self.second_solarise is None else self.second_solarise
        return first, dataclasses.replace(first, blur=blur, solarise=solarise)

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after the warm-up; scaled by the samples of a step / 256 where the recipe says so."""
        scale = self.batch_size * self.accumulate / 256 if self.scale_learning_rate else 1.0
        return self.learning_rate * scale

    def without_part(self, default: Recipe) -> list[str]:
        """Fields that differ from another recipe's and have no part in this one's objective and method.

        Example:
            >>> default = RECIPES["digits"].recipe
            >>> dataclasses.replace(default, temperature=0.1, queue=512).without_part(default)
            ['temperature', 'queue']
        """
        fmicl = self.objective == "fmicl"
        parts = {
            "divergence": fmicl,
            "order": fmicl and self.divergence == "tsallis",
            "alpha": fmicl,
            "gamma": fmicl or self.objective == "align_uniform",
            "mu": fmicl or self.objective == "spectral",
            "similarity": fmicl,
            "shift": fmicl,
            "temperature": self.objective == "infonce",
            "uniformity_weight": self.objective == "align_uniform",
            "negatives": self.method != "moco",
            "queue": self.method == "moco",
            "encoder_momentum": self.method != "simclr",
        }
        return [name for name, part in parts.items() if not part and getattr(self, name) != getattr(default, name)]

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON types; :meth:`from_json` is the way back.

        Example:
            >>> recipe = RECIPES["digits"].recipe
            >>> Recipe.from_json(recipe.to_json()) == recipe
            True
        """
        settings = dataclasses.asdict(self)
        settings["data_dir"] = None if self.data_dir is None else str(self.data_dir)
        settings["views"] = {k: list(v) if isinstance(v, tuple) else v for k, v in settings["views"].items()}
        return settings

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> Recipe:
        """The recipe that :meth:`to_json` wrote.

        Raises:
            ValueError: fields that this version doesn't know.
        """
        unknown = set(settings) - {f.name for f in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(
                f"settings hold fields that this version of fmicl doesn't know: {', '.join(sorted(unknown))}"
            )
        views: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings["views"].items()}
        data_dir = settings.get("data_dir")
        return cls(**{**settings, "views": Views(**views), "data_dir": None if data_dir is None else Path(data_dir)})


@dataclass(frozen=True)
class Entry:
    """A recipe with the name and the sentence that a person chooses it by."""

    name: str
    sentence: str
    recipe: Recipe


RECIPES: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry(
            "digits",
            "Small conv net on scikit-learn's digits (embedded): about a minute on two CPU cores.",
            # alpha and views: the best of 38 settings in k-NN and linear probe, as a mean over 6 seeds, on a quarter
            # of the training images that was held out (--validation 0.25).
            Recipe(
                dataset="digits", encoder="small_conv", hidden=256, dim=64,
                batch_size=256, learning_rate=0.2, alpha=20.0, epochs=100, warmup_epochs=5, weight_decay=5e-4,
                k=20, monitor_every=20, baselines=True,
                views=Views(
                    size=8, crop_scale=(0.4, 1.0), flip=0.0, jitter=0.8, grey=0.0, mean=(0.305,), std=(0.376,)
                ),
            ),
        ),
        Entry(
            "cifar10",
            "ResNet-18 with the CIFAR stem on CIFAR-10, SimCLR: the paper's setting.",
            Recipe(
                dataset="cifar10", encoder="resnet18", stem="small", dim=512,
                batch_size=512, learning_rate=0.1, alpha=40.0, epochs=800, weight_decay=5e-4, k=200,
                views=Views(size=32, mean=CIFAR10_MEAN, std=CIFAR10_STD),
            ),
        ),
        Entry(
            "stl10",
            "ResNet-50 on STL-10 with its unlabelled images, SimCLR: the paper's setting.",
            Recipe(
                dataset="stl10", encoder="resnet50", stem="standard", dim=512,
                batch_size=64, learning_rate=0.1, alpha=40.0, epochs=800, k=200,
                views=Views(size=96, blur=0.5, mean=STL10_MEAN, std=STL10_STD),
            ),
        ),
        Entry(
            "tinyimagenet",
            "ResNet-50 on TinyImageNet (200 classes, 64 pixels), SimCLR: the paper's setting.",
            Recipe(
                dataset="tinyimagenet", encoder="resnet50", stem="standard", dim=512,
                batch_size=256, learning_rate=0.1, alpha=40.0, epochs=800, k=200,
                views=Views(size=64, mean=(0.4802, 0.4481, 0.3975), std=(0.2770, 0.2691, 0.2821)),
            ),
        ),
        Entry(
            "imagenet",
            "ViT-S/16 on ImageNet, MoCo v3 with AdamW and two asymmetric families of views: the paper's setting.",
            Recipe(
                dataset="imagenet", encoder="vit_small_patch16_224", method="mocov3", hidden=4096, dim=512,
                batch_size=1024, learning_rate=1.5e-4, scale_learning_rate=True, optimizer="adamw",
                weight_decay=0.1, warmup_epochs=40, alpha=40.0, epochs=1000,
                k=20, monitor_every=0,  # the paper reports no k-NN here; 20 neighbours are usual, and only at the end
                views=Views(
                    size=224, crop_scale=(0.08, 1.0), saturation=0.2, blur=1.0, mean=IMAGENET_MEAN, std=IMAGENET_STD
                ),
                second_blur=0.1, second_solarise=0.2,
            ),
        ),
        Entry(
            "images",
            "Any encoder on your own folder of pictures, with or without class subfolders.",
            Recipe(
                dataset="images", encoder="resnet18", dim=512,
                batch_size=256, learning_rate=0.1, alpha=40.0, epochs=200, k=20,
                views=Views(size=224, blur=0.5, mean=IMAGENET_MEAN, std=IMAGENET_STD),
            ),
        ),
    )
}  # fmt: skip


def recipe(name: str) -> Recipe:
    """The recipe of this name.

    Raises:
        ValueError: there is none; the message names the near ones.

    Example:
        >>> recipe("stl10").batch_size
        64
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(RECIPES)}"
        raise ValueError(f"there is no recipe {name!r}; {hint}")
    return RECIPES[name].recipe
