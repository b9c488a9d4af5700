"""The option groups of the two tasks, images and text, and what is checked across groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fmicl.config.settings import TASKS, Group, Settings, TaskOptions
from fmicl.data import dataset_info
from fmicl.data.augmentations.views import LocalCropOptions, SecondViewOptions, Views, view_pair
from fmicl.data.images.options import ImageDataOptions
from fmicl.data.text.options import TextDataOptions
from fmicl.evaluation.options import EvaluationOptions
from fmicl.losses import OBJECTIVES
from fmicl.methods.rotation import RotationOptions
from fmicl.models.text import SentenceEncoderOptions
from fmicl.models.vision import EncoderOptions, ImageHeadOptions
from fmicl.utils.options import Options, option


@dataclass(frozen=True)
class BatchNormOptions(Options):
    """Batch normalisation over several GPUs."""

    sync_batchnorm: bool = option(
        True, "Batch normalisation over all GPUs together; statistics of past batches (key_statistics) always are."
    )


def _check_images(settings: Settings) -> None:
    _check_labels(settings, settings.labels)
    _resolve_images(settings)
    if settings.local_crops and not settings.method_options.method.local_crops:
        raise ValueError(
            f"method {settings.method} takes no local crops, but local_crops is {settings.local_crops}: leave it at 0"
        )
    if settings.multiplicity == 2:
        return
    if not settings.method_options.method.many_views:
        raise ValueError(
            f"method {settings.method} compares two views of a sample, but multiplicity is {settings.multiplicity}: "
            "leave it at 2, or take --method simclr"
        )
    first, second = view_pair(settings[Views], settings[SecondViewOptions])
    if first != second:
        raise ValueError(
            f"multiplicity is {settings.multiplicity}, and more than two views of a sample must be of one family: "
            "leave second_blur and second_solarise as in the first"
        )


def _check_labels(settings: Settings, labels: bool) -> None:
    """Refuse an objective that can't train with labels, or can't without.

    Raises:
        ValueError: with the objective's name and what to do.
    """
    kind = type(settings.objective_options)
    if kind.needs_labels and not labels:
        raise ValueError(f"objective {settings.objective} needs labels: add --labels, for images with classes")
    if labels and not kind.takes_labels and kind is not OBJECTIVES[settings.objective].value:
        raise ValueError(f"method {settings.method} has a loss of its own, which takes no labels: leave --labels out")
    if labels and not kind.takes_labels:
        known = ", ".join(entry.name for entry in OBJECTIVES if entry.value.takes_labels)
        raise ValueError(f"objective {settings.objective} can't train with labels; take one of {known}")
    queue = settings.method_options.method.explicit_negatives
    if labels and queue and settings.label_negatives == "other_classes":
        raise ValueError(
            f"the negatives of method {settings.method} are a queue without labels: leave --label-negatives at all"
        )


def _why_unused_images(settings: Settings) -> dict[str, str]:
    return {} if settings.labels else dict.fromkeys(("label_noise", "label_negatives"), "it needs --labels")


def _resolve_images(settings: Settings) -> dict[str, Any]:
    if "size" in settings.unresolved:
        return {}
    return {
        "rotation_size": settings[RotationOptions].size(settings.size),
        "local_size": settings[LocalCropOptions].size(settings.size),
    }


IMAGES = TaskOptions(
    "images",
    groups=(
        Group(ImageDataOptions, "data"),
        Group(Views, "views"),
        Group(SecondViewOptions, "second view"),
        Group(LocalCropOptions, "local crops"),
        Group(RotationOptions, "rotation prediction"),
        Group(EncoderOptions, "encoder"),
        Group(ImageHeadOptions, "projection head"),
        Group(BatchNormOptions, "batch normalisation"),
        Group(EvaluationOptions, "evaluation"),
    ),
    check=_check_images,
    why_unused=_why_unused_images,
    resolve=_resolve_images,
    from_data=("encoder", "size", "batch_size", "epochs", "learning_rate", "mean", "std"),
    data_option="data_dir",
    needs_data=lambda settings: dataset_info(settings.dataset).needs_folder,
    packages=("timm", "torchvision", "scikit-learn"),
    loader="fmicl.load_encoder(RUN)",
)


def _why_unused_text(settings: Settings) -> dict[str, str]:
    found = {
        "key_statistics": "sentence encoders have no batch normalisation",
        "label_negatives": "sentences have no labels",
    }
    if not settings.method_options.method.has_predictor:
        found["hidden"] = f"method {settings.method} has no predictor"
    return found


TEXT = TaskOptions(
    "text",
    groups=(Group(SentenceEncoderOptions, "encoder"), Group(TextDataOptions, "data")),
    # The f-MICL paper's values for English Wikipedia, and SimCSE's temperature.
    defaults={
        "alpha": 409600.0, "gamma": 20.0, "temperature": 0.05, "epochs": 1, "batch_size": 64, "optimizer": "adamw",
        "learning_rate": 3e-5, "schedule": "linear", "weight_decay": 0.0, "warmup_epochs": 0.0, "clip": 1.0,
    },
    check=lambda settings: _check_labels(settings, labels=False),
    why_unused=_why_unused_text,
    contrast_views=True,  # SimCSE compares each first view with all second ones
    high_precision=True,  # at gamma = 20, inner products in bfloat16 would put the gradient off by several percent
    packages=("transformers", "tokenizers", "sentence-transformers"),
    loader="sentence_transformers.SentenceTransformer(RUN)",
)  # fmt: skip

TASKS.update({task.name: task for task in (IMAGES, TEXT)})
