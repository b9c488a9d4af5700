"""Evaluation of a run on images: k-NN, linear probe, geometry, baselines; results.json and the figures' arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fmicl.config import Settings
from fmicl.data import (
    FileSamples,
    Samples,
    Skipped,
    Splits,
    ViewStream,
    dataset_info,
    describe_change,
    display_images,
    evaluation_batches,
    printable,
    summarise_skipped,
)
from fmicl.data.augmentations.views import SecondViewOptions, Views, view_pair
from fmicl.evaluation.features import EVALUATION_BATCH, evaluation_batch_size, extract_features
from fmicl.evaluation.geometry import (
    alignment,
    effective_rank,
    lidar,
    nearest_neighbours,
    pair_distances,
    rankme,
    uniformity,
)
from fmicl.evaluation.probes import knn_accuracy, linear_probe
from fmicl.methods import Method
from fmicl.runs.export import EncoderConfig, load_encoder, load_projection
from fmicl.runs.folder import READ_ONLY_HINT, Run, open_run
from fmicl.runs.settings import read_fingerprint, read_settings
from fmicl.training.tasks.base import Monitor
from fmicl.training.tasks.image_parts import build_image_encoder, load_splits
from fmicl.utils.device import pick_device
from fmicl.utils.files import back_up_json, check_writable, read_json, write_atomically, write_json

RAW_SIZE = 32
"""Side of the images whose raw pixels are a baseline, at most: a linear probe of more dimensions takes minutes."""
PAIRS = 2048
"""Largest number of samples that the geometry of the embeddings is measured on."""
RANK_SAMPLES, RANK_VIEWS = 1000, 10
"""Largest number of samples that RankMe and LiDAR are measured on, and views of each."""
FEW_CLASSES = 20
"""Up to this number of classes, results.json has their names too."""
QUERIES, NEIGHBOURS = 6, 8
"""Rows and columns of the figure of nearest neighbours."""


def evaluate_run(
    run: Run | Path,
    *,
    splits: Splits | None = None,
    data_dir: Path | None = None,
    device: str = "auto",
    workers: int | None = None,
    probe_views: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Evaluate a run's encoder after its last epoch, and write results.json and arrays.safetensors.

    k-NN and linear probe use the frozen features of the training split. Alignment, uniformity, effective rank and pair
    distances are measured on the embeddings (after the projection head, unit length) of two random views of held-out
    samples; RankMe and LiDAR on ten views, both after the projection head (``rankme``, ``lidar``) and before it
    (``rankme_features``, ``lidar_features``). None of these needs labels.
    Earlier results that differ are kept under another name. Results on data that changed since training say so
    (``data_changed``). Image files that can't be decoded are left out, counted and named.

    Args:
        run: the run folder.
        splits: its data, if it is loaded already.
        data_dir: the folder of the data, if it has moved.
        device: where to compute: auto (a GPU if there is one), cpu, cuda or mps.
        workers: processes that decode images; None is as in training.
        probe_views: random crops and flips of each training image for a second linear probe; None is as in training.
        say: prints warnings: data that has changed since training, images that can't be read.

    Returns:
        The content of results.json.

    Raises:
        FileNotFoundError: the run has no encoder yet, or the data doesn't exist.
        PermissionError: the results can't be written into the run folder.
    """
    run = open_run(run.path if isinstance(run, Run) else run)
    check_writable(run.path, READ_ONLY_HINT)
    settings = read_settings(run, "images")
    changes: dict[str, Any] = {
        "data_dir": data_dir, "workers": workers, "probe_views": probe_views, "download": False,
    }  # fmt: skip
    settings = settings.replace(**{key: value for key, value in changes.items() if value is not None})
    place = pick_device(device)
    encoder, projection = load_encoder(run.path).to(place), load_projection(run).to(place)
    results: dict[str, Any] = {"knn": None, "linear": None, "epoch": settings.epochs, "split": None}
    if splits is None:
        splits = load_splits(settings, say)
        changed = describe_change(read_fingerprint(run), splits)
        if changed:
            say(
                f"warning: the data has changed since {run.path} was trained, so these are not the run's own results: "
                f"{changed}. Images that it was trained on may be among those it is evaluated on now"
            )
            results["data_changed"] = changed
        elsewhere = changed or data_dir is not None
        if elsewhere and settings.data_dir is not None and dataset_info(settings.dataset).needs_folder:
            results["data_dir"] = printable(str(settings.data_dir.expanduser().absolute()))
    gallery, queries = splits.train or splits.pretrain, splits.test
    broken: list[Skipped] = []
    features, labels = _features(encoder, gallery, settings, place, broken)
    gallery = _without(gallery, broken)
    query_features = None
    if queries is not None and labels is not None:
        if settings.k > len(features):
            say(f"k is {len(features)}, the number of training images, and not {settings.k}")
        query_features, query_labels = _features(encoder, queries, settings, place, broken)
        queries = _without(queries, broken)
        splits = dataclasses.replace(splits, train=gallery, test=queries)
        assert query_labels is not None
        results |= _accuracies(features, labels, query_features, query_labels, settings)
        if settings.probe_views:
            views = _features_of_views(encoder, gallery, settings, place)
            probe = linear_probe(features, labels, query_features, query_labels, seed=settings.seed, views=views)
            results |= {"linear_views": probe.accuracy, "linear_views_protocol": probe.protocol}
        results |= {"split": splits.split, "train_samples": len(gallery), "test_samples": len(queries)}
        results["classes"] = len(splits.classes)
        if len(splits.classes) <= FEW_CLASSES:
            results["class_names"] = [printable(name) for name in splits.classes]
        results |= _baselines(run, splits, settings, place, say)
    else:
        unused = [name for name in ("probe_views", "baselines") if getattr(settings, name)]
        if unused:
            say(f"warning: no effect without labels: {', '.join(unused)}")
    geometry, distances = _geometry(nn.Sequential(encoder, projection), queries or gallery, settings, place)
    results |= geometry | _ranks(encoder, projection, queries or gallery, settings, place)
    results["distances"] = {name: _quantiles(values) for name, values in distances.items()}
    results["skipped_images"] = len(splits.skipped) + len(broken)
    if broken:
        left_out = summarise_skipped(broken)
        say(f"warning: {len(broken)} image(s) can't be decoded and are left out of the evaluation: {left_out}")
    arrays = distances | _neighbours(features, query_features, gallery, queries, settings)
    backup = back_up_json(run.results, results)
    if backup is not None:
        say(f"{run.results} is replaced; the results before, which differ, are kept in {backup.name}")
    write_atomically(run.arrays, lambda path: save_file(arrays, path))
    write_json(run.results, results)
    return results


class KNNMonitor(Monitor):
    """k-NN accuracy of the encoder during training, in percent."""

    def __init__(self, settings: Settings, splits: Splits, device: torch.device) -> None:
        super().__init__("knn")
        self.settings, self.splits, self.device = settings, splits, device
        self._bf16 = device.type == "cuda" and settings.precision != "32" and torch.cuda.is_bf16_supported()

    def due(self, epoch: float) -> bool:
        """After every `monitor_every` epochs."""
        every: int = self.settings.monitor_every
        return every > 0 and epoch % every == 0

    def measure(self, method: Method, step: int) -> float:  # noqa: ARG002 (text notes the step)
        """In the precision of training; the evaluation at the end is in 32 bit."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16):
            x, labels, y, answers = _labelled_features(method.encoder, self.splits, self.settings, self.device)
        return knn_accuracy(x, labels, y, answers, k=min(self.settings.k, len(x)))


def _features(
    encoder: nn.Module,
    samples: Samples,
    settings: Settings,
    device: torch.device,
    broken: list[Skipped] | None = None,
    *,
    size: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Features and labels of the samples that can be decoded; the others are added to ``broken``."""
    batches = evaluation_batches(
        samples,
        size=size or settings.size,
        mean=settings.mean,
        std=settings.std,
        batch_size=_batch_size(settings, device),
        device=device,
        workers=settings.workers,
        skipped=[] if broken is None else broken,
    )
    return extract_features(encoder, batches, device)


def _labelled_features(
    encoder: nn.Module, splits: Splits, settings: Settings, device: torch.device, size: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features and labels of the training split, then those of the test split."""
    assert splits.train is not None
    assert splits.test is not None
    x, labels = _features(encoder, splits.train, settings, device, size=size)
    y, answers = _features(encoder, splits.test, settings, device, size=size)
    assert labels is not None
    assert answers is not None
    return x, labels, y, answers


def _batch_size(settings: Settings, device: torch.device) -> int:
    return evaluation_batch_size(settings.size, device, settings.multiplicity * settings.batch_size)


def _features_of_views(
    encoder: nn.Module, samples: Samples, settings: Settings, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Features of random crops and flips of all samples, without colour augmentation, and the index of each sample.

    Samples that don't fill a last batch make a smaller one.
    """
    family = dataclasses.replace(settings[Views], jitter=0.0, grey=0.0, blur=0.0, solarise=0.0)
    number, made = settings.probe_views, max(2, settings.probe_views)  # a stream has two views at least
    batch = min(max(1, _batch_size(settings, device) // made), len(samples))
    stream = ViewStream(
        samples, (family, family), batch, seed=settings.seed, device=device, workers=settings.workers,
        multiplicity=made, report=lambda _: None,
    )  # fmt: skip
    owners: list[Tensor] = []

    def batches() -> Iterator[tuple[Tensor, None]]:
        for views in stream:
            owners.append(views.index.repeat(number))
            yield torch.cat([views.first, views.second])[: number * batch], None

    features, _ = extract_features(encoder, batches(), device)
    owner = torch.cat(owners)
    done = {*owner.tolist(), *stream.undecodable}
    rest = [i for i in range(len(samples)) if i not in done]
    if not rest:
        return features, owner
    more, whose = _features_of_views(encoder, samples.select(rest), settings, device)
    return torch.cat([features, more]), torch.cat([owner, torch.tensor(rest, device=owner.device)[whose]])


def _without(samples: Samples, broken: list[Skipped]) -> Samples:
    if not broken or not isinstance(samples, FileSamples):
        return samples
    gone = {skipped.path for skipped in broken}
    return samples.select([i for i, path in enumerate(samples.paths) if path not in gone])


def _accuracies(x: Tensor, labels: Tensor, y: Tensor, answers: Tensor, settings: Settings) -> dict[str, Any]:
    k = min(settings.k, len(x))
    knn = knn_accuracy(x, labels, y, answers, k=k)
    probe = linear_probe(x, labels, y, answers, seed=settings.seed)
    found: dict[str, Any] = {
        "knn": knn, "linear": probe.accuracy, "k": k, "linear_protocol": probe.protocol,
        "linear_weight_decay": probe.weight_decay,
    }  # fmt: skip
    return found if probe.top5 is None else {**found, "linear_top5": probe.top5}


def _baselines(
    run: Run, splits: Splits, settings: Settings, device: torch.device, say: Callable[[str], None]
) -> dict[str, Any]:
    """What the accuracies are compared with: the weights that training started from, raw pixels, and chance."""
    found: dict[str, Any] = {}
    if settings.weights is not None:
        try:
            found["start"] = _baseline(build_image_encoder(settings).to(device), splits, settings, device)
        except (OSError, ValueError) as error:  # they were there when training started
            before = read_json(run.results).get("start") if run.results.exists() else None
            found |= {} if before is None else {"start": before}
            say(f"warning: the start can't be evaluated {'again' if before else 'any more'}: {error}")
    if settings.baselines:
        found["raw_pixels"] = _baseline(nn.Flatten(), splits, settings, device, min(settings.size, RAW_SIZE))
        if settings.weights is None:
            torch.manual_seed(settings.seed)  # as in training, so this is what training started from
            found["untrained"] = _baseline(EncoderConfig.read(run).build().to(device), splits, settings, device)
        found["chance"] = _chance(splits)
    return found


def _chance(splits: Splits) -> dict[str, float]:
    """Accuracy of the most frequent class of the training split as the answer to all."""
    assert splits.train is not None
    assert splits.test is not None
    labels, answers = splits.train.labels, splits.test.labels
    assert labels is not None
    assert answers is not None
    share = 100.0 * float((answers.cpu() == labels.cpu().mode().values).double().mean())
    return {"knn": share, "linear": share}


def _baseline(
    encoder: nn.Module, splits: Splits, settings: Settings, device: torch.device, size: int | None = None
) -> dict[str, float]:
    found = _accuracies(*_labelled_features(encoder, splits, settings, device, size), settings)
    return {"knn": found["knn"], "linear": found["linear"]}


def _geometry(
    model: nn.Module, samples: Samples, settings: Settings, device: torch.device
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Alignment, uniformity and effective rank of the embeddings, and pair distances."""
    x, y = positive_pairs(model, samples, settings, device, PAIRS)
    geometry = {"alignment": alignment(x, y), "uniformity": uniformity(x), "effective_rank": effective_rank(x)}
    distances = pair_distances(x, y, seed=settings.seed)
    return geometry, {"positive": distances.positive.cpu(), "negative": distances.negative.cpu()}


def _ranks(
    encoder: nn.Module, projection: nn.Module, samples: Samples, settings: Settings, device: torch.device
) -> dict[str, float]:
    """RankMe and LiDAR of the projection head's outputs and of the features, from several views of each sample."""
    batch = min(max(1, _batch_size(settings, device) // RANK_VIEWS), len(samples))
    stream = ViewStream(
        samples, (settings[Views], settings[Views]), batch, seed=settings.seed, device=device,
        workers=settings.workers, multiplicity=RANK_VIEWS, report=lambda _: None,
    )  # fmt: skip
    features: list[Tensor] = []
    for views in islice(stream, max(1, RANK_SAMPLES // batch)):
        rows, _ = extract_features(encoder, [(torch.cat([views.first, views.second]), None)], device)
        features.append(rows.view(RANK_VIEWS, batch, -1).transpose(0, 1))
    before = torch.cat(features)
    if len(before) < 2:  # a single held-out image
        return {}
    after, _ = extract_features(projection, [(before.flatten(0, 1), None)], device)
    found: dict[str, float] = {}
    for suffix, rows in {"": after, "_features": before.flatten(0, 1)}.items():
        found["rankme" + suffix] = rankme(rows)
        found["lidar" + suffix] = lidar(rows.view(*before.shape[:2], -1))
    return found


def positive_pairs(
    model: nn.Module, samples: Samples, settings: Settings, device: torch.device, number: int, epoch: int = 0
) -> tuple[Tensor, Tensor]:
    """Unit embeddings of two random views of each of up to ``number`` samples, (N, d) each."""
    batch = min(EVALUATION_BATCH, _batch_size(settings, device), len(samples))
    families = view_pair(settings[Views], settings[SecondViewOptions])
    stream = ViewStream(samples, families, batch, seed=settings.seed, device=device, workers=settings.workers)
    stream.set_position(epoch=epoch, batch=0)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for pair in islice(stream, max(1, number // batch)):
        for views, embeddings in zip((pair.first, pair.second), found, strict=True):
            embeddings.append(extract_features(model, [(views, None)], device)[0])
    x, y = (nn.functional.normalize(torch.cat(embeddings), dim=1) for embeddings in found)
    return x, y


def untrained_distances(run: Path, *, device: str = "auto") -> list[float]:
    """Percentiles of the distances of negative pairs before training: the run's networks with their initial weights.

    Args:
        run: the run folder; its data must be where it was.
        device: where to compute.
    """
    folder = open_run(run)
    settings, place = read_settings(folder, "images"), pick_device(device)
    splits = load_splits(settings, lambda _: None)
    torch.manual_seed(settings.seed)
    encoder = EncoderConfig.read(folder).build()
    model = nn.Sequential(encoder, load_projection(folder, trained=False)).eval().to(place)
    _, distances = _geometry(model, splits.test or splits.train or splits.pretrain, settings, place)
    return _quantiles(distances["negative"])


def _quantiles(values: Tensor) -> list[float]:
    """Percentiles 0 to 100: what a figure needs of sorted distances."""
    return [round(x, 4) for x in values.double().quantile(torch.linspace(0, 1, 101, dtype=torch.float64)).tolist()]


def _neighbours(
    features: Tensor,
    query_features: Tensor | None,
    gallery: Samples,
    queries: Samples | None,
    settings: Settings,
) -> dict[str, Tensor]:
    """Images of a few samples and of their nearest neighbours in the training split."""
    own = query_features is None or queries is None
    asked, pool = (features, gallery) if own else (query_features, queries)
    assert asked is not None
    assert pool is not None
    generator = torch.Generator().manual_seed(settings.seed)
    chosen = torch.randperm(len(asked), generator=generator)[:QUERIES]
    count = min(NEIGHBOURS, len(features) - int(own))
    if count < 1:
        return {}
    # If the queries are part of the gallery, each is its own nearest neighbour and is left out.
    found = nearest_neighbours(features, asked[chosen.to(asked.device)], count + int(own))
    indices, similarity = found.indices[:, int(own) :], found.similarities[:, int(own) :]
    rows = torch.stack([display_images(gallery, row, settings.size) for row in indices])
    shown = torch.cat([display_images(pool, chosen, settings.size).unsqueeze(1), rows], dim=1)
    return {"neighbour_images": shown.contiguous(), "neighbour_similarity": similarity.cpu().contiguous()}
