"""Settings as data: what each recipe trains, on what, for how long.

A recipe is one frozen dataclass, and :data:`RECIPES` below reads like the paper's table of settings; those on sentences
are in :mod:`fmicl.config.text_recipes`. The command line (:mod:`fmicl.cli.main`) is derived from these classes: a field that is
added here is an option there. Nothing in this file imports torch, so that ``fmicl --help`` answers at once.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from fmicl.config.fields import require_known
from fmicl.config.settings import Settings
from fmicl.data.augmentations.views import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    STL10_MEAN,
    STL10_STD,
    Views,
)


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """All settings of one training run on images: objective x method x encoder x data, and how it is optimised.

    Raises:
        ValueError: a number is out of its range, or two settings contradict each other. The message names the field.

    Example:
        >>> recipe = dataclasses.replace(RECIPES["cifar10"].recipe, divergence="js", epochs=200)
        >>> recipe.encoder, recipe.batch_size, recipe.alpha
        ('resnet18', 512, 40.0)
    """

    kind: ClassVar[str] = "images"
    machine: ClassVar[frozenset[str]] = Settings.machine | {
        "data_dir", "download", "checksum", "memory_gib", "workers", "monitor_every",
    }  # fmt: skip
    """Of these, memory_gib too changes roundings: it says where images are resized."""
    paths: ClassVar[tuple[str, ...]] = ("data_dir",)
    automatic: ClassVar[dict[str, Any]] = {**Settings.automatic, "rotation_size": None}

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
    """Hold out this share of the labelled training data (of a folder about as much, by file names) and evaluate on it,
    not on the test data: for tuning."""
    views: Views = field(default_factory=Views)
    """The random views of a sample."""
    second_blur: float | None = None
    """Probability of blur in the second view (None: as in the first)."""
    second_solarise: float | None = None
    """Probability of solarisation in the second view (None: as in the first)."""
    multiplicity: int = 2
    """simclr: views of each sample in a batch, two or more. The loss is the mean over every two of them; the time of an
    epoch grows in proportion."""

    # A second term
    rotation_weight: float = 0.0
    """Weight of a second term of the loss, by which features tell how far an image was turned: E-SSL (0: none). It is
    the bound of their f-mutual information, by fmicl's divergence, whose f(0) must be finite, or by KL for other
    objectives; E-SSL takes 0.4."""
    rotation_size: int | None = None
    """Side of the images that are turned, which come of the first views (None: half of theirs, if that leaves 16)."""

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
    """Width of the hidden layers of the projection head, and of the one that tells turns."""
    dim: int = 512
    """Dimension d of the embeddings."""

    # Evaluation
    k: int = 200
    """Neighbours in the k-NN classifier."""
    monitor_every: int = 10
    """Epochs between two k-NN evaluations in training (0: only at the end)."""
    probe_views: int = 0
    """Fit a second linear probe at the end, to so many random crops and flips of each training image as well
    (0: none)."""
    baselines: bool = False
    """Evaluate raw pixels and the untrained encoder as well."""

    # Machine
    sync_batchnorm: bool = True
    """Batch normalisation over all GPUs together; statistics of the batches before (key_statistics) always are."""
    workers: int = 8
    """Processes that decode images, for data that doesn't fit into memory."""

    def __post_init__(self) -> None:
        """Refuse numbers that can't be meant."""
        super().__post_init__()
        self._require_positive("hidden", "dim", "k")
        if self.depth is not None:
            self._require_positive("depth")
        self._require_not_negative("monitor_every", "probe_views", "workers", "memory_gib", "rotation_weight")
        if self.rotation_size is not None and not 1 <= self.rotation_size <= self.views.size:
            raise ValueError(
                f"rotation_size must lie between 1 and the side of the views ({self.views.size}), to which images are "
                f"cropped, but it is {self.rotation_size}"
            )
        self._require_share("second_blur", "second_solarise")
        if self.multiplicity < 2:
            raise ValueError(f"multiplicity must be at least 2 views of each sample, but it is {self.multiplicity}")
        if self.multiplicity > 2 and self.method != "simclr":
            raise ValueError(
                f"method {self.method} compares two views of a sample, but multiplicity is {self.multiplicity}: leave "
                "it at 2, or take --method simclr"
            )
        if self.multiplicity > 2 and self.view_pair[0] != self.view_pair[1]:
            raise ValueError(
                f"multiplicity is {self.multiplicity}, and more than two views of a sample must be of one family: "
                "leave second_blur and second_solarise as in the first"
            )
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation is a share of the training data, in [0, 1), but it is {self.validation}")

    @property
    def turned_size(self) -> int:
        """Side of the images that are turned, settled.

        Example:
            >>> RECIPES["cifar10"].recipe.turned_size, RECIPES["digits"].recipe.turned_size
            (16, 8)
        """
        half = self.views.size // 2
        return self.rotation_size or (half if half >= 16 else self.views.size)

    def settled(self) -> Self:
        """The same, with what a run chooses by itself as it is chosen."""
        return dataclasses.replace(super().settled(), rotation_size=self.turned_size if self.rotation_weight else None)

    def parts(self) -> dict[str, bool]:
        """Of each setting that not all runs have, whether it has a part in this one."""
        return {**super().parts(), "rotation_size": self.rotation_weight > 0}

    def because(self) -> dict[str, str]:
        """Of settings whose part doesn't follow from objective and method alone, where they have none, in words."""
        return {**super().because(), "rotation_size": "without --rotation-weight"}

    @property
    def view_pair(self) -> tuple[Views, Views]:
        """The two families of views; they differ only for methods with asymmetric views (MoCo v3)."""
        first = self.views
        blur = first.blur if self.second_blur is None else self.second_blur
        solarise = first.solarise if self.second_solarise is None else self.second_solarise
        return first, dataclasses.replace(first, blur=blur, solarise=solarise)

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> Self:
        """The recipe that :meth:`to_json` wrote.

        Raises:
            ValueError: fields that this version doesn't know.
        """
        views: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings["views"].items()}
        require_known(Views, views)
        return super().from_json({**settings, "views": Views(**views)})


R_co = TypeVar("R_co", bound=Settings, covariant=True)


@dataclass(frozen=True)
class Entry(Generic[R_co]):
    """A recipe with the name and the sentence that a person chooses it by."""

    name: str
    sentence: str
    recipe: R_co


RECIPES: dict[str, Entry[Recipe]] = {
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
        raise no_recipe(name, RECIPES)
    return RECIPES[name].recipe


def no_recipe(name: str, known: Iterable[str]) -> ValueError:
    """The error that there is no recipe of a name, which says the near ones."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known)}"
    return ValueError(f"there is no recipe {name!r}; {hint}")
