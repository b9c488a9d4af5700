"""Training on images: data set, encoder, views, k-NN during training, export and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmicl.config import Settings, recipe
from fmicl.config.image_defaults import ImageFacts, choose_defaults
from fmicl.data import (
    Skipped,
    ViewStream,
    dataset_info,
    describe_change,
    describe_splits,
    fingerprint,
    require_data_dir,
    summarise_skipped,
    survey_folder,
    training_labels,
)
from fmicl.data.augmentations.views import LocalCropOptions, SecondViewOptions, Views, view_pair
from fmicl.divergences.critic import require_finite_at_zero
from fmicl.methods import Method
from fmicl.models.vision import encoder_specific_options
from fmicl.runs.export import EncoderConfig, export
from fmicl.runs.folder import Run, exclude_runs
from fmicl.runs.initial_weights import ENCODER_ARGUMENTS, check_weights, preprocessing_of
from fmicl.runs.tables import print_results
from fmicl.training.memory import BatchDescription
from fmicl.training.tasks.base import Context, Monitor, Task
from fmicl.training.tasks.image_evaluation import KNNMonitor, evaluate_run
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method, load_splits

_CHECKED_ENCODERS: set[tuple[object, ...]] = set()  # a sweep has many runs of one encoder


class ImageTask(Task):
    """Training on a data set of images, or a folder of them."""

    unit = "images"
    channels_last = True

    def __init__(self, settings: Settings, context: Context) -> None:
        super().__init__(settings, context)
        self.synchronise_batchnorm = settings.sync_batchnorm
        self.encoder = build_image_encoder(settings, load=context.fresh)
        self.splits = load_splits(settings, context.say)
        self.stream = ViewStream(
            self.splits.pretrain,
            view_pair(settings[Views], settings[SecondViewOptions]),
            settings.batch_size // context.processes.world_size,
            seed=settings.seed,
            device=context.device,
            rank=context.processes.rank,
            world_size=context.processes.world_size,
            workers=settings.workers,
            labels=training_labels(self.splits, settings.label_noise, settings.seed) if settings.labels else None,
            multiplicity=settings.multiplicity,
            local=(settings[LocalCropOptions].views(settings[Views]), settings.local_crops),
            compile=context.compiled,
            report=self._report_broken,
        )
        if settings.memory_gib and dataset_info(settings.dataset).is_folder:
            self.memory_hint = "; with --memory-gib 0 the images stay on the disk"

    @classmethod
    def resolve(cls, settings: Settings, device: torch.device, say: Callable[[str], None]) -> Settings:
        """Defaults by number and size of a folder's images, and by the device."""
        check_weights(settings)
        unresolved = settings.unresolved
        if not unresolved:
            return settings
        defaults, why = {}, "as the weights need it"
        if dataset_info(settings.dataset).is_folder:
            count, side = survey_folder(require_data_dir(settings.dataset, settings.data_dir), exclude_runs)
            facts = ImageFacts(
                count=round(count * (1 - settings.validation)), side=side, gpu=device.type != "cpu",
                trained=settings.weights is not None,
            )  # fmt: skip
            defaults, why = choose_defaults(facts), str(facts)
        encoder = defaults.get("encoder") if settings.encoder == "auto" else settings.encoder
        defaults |= preprocessing_of(settings.weights, encoder)
        missing = [f"--{name.replace('_', '-')}" for name in unresolved if name not in defaults]
        if missing:
            raise ValueError(f"auto is for folders of images: give {settings.dataset} values of {', '.join(missing)}")
        # A run's encoder comes with its stem and the like.
        own = set(ENCODER_ARGUMENTS) - set(settings.changes) if "encoder" in unresolved else set()
        chosen = {name: value for name, value in defaults.items() if name in unresolved or name in own}
        shown = {name: value for name, value in chosen.items() if settings.weights or name not in ("mean", "std")}
        say(f"{why}: {' '.join(recipe(settings.recipe, **shown).arguments())}")
        return settings.replace(**chosen)

    @classmethod
    def resolve_as(cls, settings: Settings, before: Settings) -> Settings:
        """With the encoder's stem and the like, if they are not given."""
        own = set(ENCODER_ARGUMENTS) - set(settings.changes) if "encoder" in settings.unresolved else set()
        return super().resolve_as(settings, before).replace(**{name: getattr(before, name) for name in own})

    @classmethod
    def check(cls, settings: Settings, *, local: bool = True) -> None:
        """Build objective and encoder without weights, and look for the data."""
        settings.objective_options.build(settings.objective_context())
        if settings.rotation_weight:
            divergence = settings.objective_options.information_divergence(settings.objective_context())
            require_finite_at_zero(divergence, "rotation prediction")
        if dataset_info(settings.dataset).needs_folder:
            require_data_dir(settings.dataset, settings.data_dir, exists=local and not settings.download)
        if settings.unresolved:  # of a sweep, before its runs see their data
            return
        parts = (
            "encoder", "stem", "depth", "stable_vit", "size", "mean", "rotation_weight", "rotation_size",
            "local_crops", "local_size", "method", "parts", "freeze",
        )  # fmt: skip
        key = tuple(getattr(settings, name) for name in parts)
        if key in _CHECKED_ENCODERS:
            return
        try:
            with torch.device("meta"):
                build_image_encoder(settings, load=False)
        except Exception:  # models raise whatever they like; whether it is for want of weights is seen with them
            with torch.random.fork_rng(devices=[]):
                build_image_encoder(settings, load=False)
        _CHECKED_ENCODERS.add(key)

    def _report_broken(self, broken: Sequence[Skipped]) -> None:
        """Report files that passed the check of their header and end; each process reports its own."""
        replaced = summarise_skipped(broken)
        print(
            f"warning: {len(broken)} image(s) can't be decoded, others are trained on instead: {replaced}", flush=True
        )

    def fingerprint(self) -> dict[str, Any]:
        """Digests of the images that are trained on and evaluated on."""
        return fingerprint(self.splits)

    def data_changes(self, before: dict[str, Any] | None) -> str:
        """Which of them changed."""
        return describe_change(before, splits=self.splits)

    def build_method(self) -> Method:
        """The method around the encoder, with rotation prediction if it is asked for."""
        return build_image_method(self.settings, self.encoder, len(self.splits.classes))

    def example_views(self, n: int) -> Tensor:
        """Random images."""
        size = self.settings.size
        return torch.rand(n, len(self.settings.mean), size, size)

    def batch_description(self) -> BatchDescription:
        """With the options that make an image smaller."""
        ways = ["--encoder or --size needs less as well"]
        if self.settings.multiplicity > 2:
            ways.append("so does a --multiplicity of 2")
        if self.settings.local_crops:
            ways.append("so do fewer --local-crops")
        if self.settings.rotation_weight:
            ways.append("so does a smaller --rotation-size")
        advice = f"a smaller {', '.join(ways)}"
        crops = self.settings.local_crops, self.settings[LocalCropOptions].size(self.settings.size)
        return BatchDescription(self.settings.batch_size, self.settings.multiplicity, advice, *crops)

    def embedding_dim(self) -> int:
        """The option `dim`."""
        return int(self.settings.dim)

    def start_lines(self) -> list[str]:
        """Classes and held-out images, and options that this encoder doesn't have."""
        changed = {"stem", "stable_vit"} & set(self.settings.changes)
        unused = sorted(changed - encoder_specific_options(self.encoder))
        lines = [f"warning: {name} has no effect: encoder {self.settings.encoder} has no such part" for name in unused]
        return [describe_splits(self.splits), *lines]

    def monitor(self) -> Monitor:
        """k-NN accuracy; nothing where the data has no labels."""
        if self.splits.train is None or self.splits.test is None:
            return Monitor("knn")
        return KNNMonitor(self.settings, self.splits, self.context.device)

    def finish(self, run: Run, method: Method, monitor: Monitor) -> None:  # noqa: ARG002 (the last encoder is exported)
        """Export the encoder of the last epoch, and evaluate it by k-NN, linear probe and geometry."""
        config = EncoderConfig.of(self.settings, int(self.encoder.num_features))  # type: ignore[arg-type]
        export(run, method.encoder, method.projection, config)
        self.context.say(
            "trained; now k-NN and a linear probe" if self.splits.test is not None else "trained; now its geometry"
        )
        evaluate_run(
            run,
            splits=self.splits,
            device=self.settings.device,
            workers=self.settings.workers,
            say=self.context.say,
        )

    @classmethod
    def print_results(cls, run: Run) -> None:
        """A table of accuracies."""
        print_results(run.path)
