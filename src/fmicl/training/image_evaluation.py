"""What a trained encoder is worth: the numbers in results.json, and the arrays that the figures are drawn from."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fmicl.config.recipes import Recipe
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
    load_images,
    printable,
    summarise_skipped,
)
from fmicl.evaluation.geometry import alignment, effective_rank, nearest_neighbours, pair_distances, uniformity
from fmicl.evaluation.probes import extract_features, knn_accuracy, linear_probe
from fmicl.runs.export import EncoderConfig, load_encoder, load_projection
from fmicl.runs.folder import COPY_IT, Run, exclude_runs, open_run, read_fingerprint, read_recipe
from fmicl.utils.device import pick_device
from fmicl.utils.files import back_up_json, check_writable, write_atomically, write_json

EVALUATION_BATCH = 512
EVALUATION_PIXELS = 2**19
"""A batch of large images has fewer of them, so that it has no more pixels than 512 images of CIFAR-10: a CPU machine
that has the memory to train has it to evaluate."""
GPU_PIXELS = 2**21
"""On a GPU a batch of small images has more of them, up to so many pixels, or views of a training step: it takes longer
to ask for a kernel than to run it."""
GPU_LARGE = 2**23
"""Pixels of a batch of large images there; where a training step has more of them, an evaluation may, too."""
PAIRS = 2048
"""At most so many samples are looked at for the geometry of the embeddings."""
FEW_CLASSES = 20
"""Up to so many classes, results.json has their names as well as their number."""
QUERIES, NEIGHBOURS = 6, 8
"""Rows and columns of the picture of nearest neighbours."""


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
    """Evaluate the encoder that a run left, after its last epoch, and write results.json and arrays.safetensors.

    k-NN and linear probe are on the frozen features, and learn from the training split only. Alignment, uniformity,
    effective rank and the distances are those of the embeddings (after the projection head) of two random views of
    samples that were held out. Results that say something else are not thrown away: they get a number. Those on other
    data than the run was trained on say so (``data_changed``). Image files that can't be decoded are left out, counted
    and named.

    Args:
        run: the run folder.
        splits: its data, where it is in memory already.
        data_dir: where the data is now, if it has moved.
        device: where to compute: auto (a GPU if there is one), cpu, cuda or mps.
        workers: processes that decode images; None is as in training.
        probe_views: random crops and flips of each training image for a second linear probe; None is as in the recipe.
        say: where warnings go: of data that has changed since training, and of images that can't be read.

    Returns:
        What results.json holds.

    Raises:
        FileNotFoundError: the run has no encoder yet, or the data isn't there.
        PermissionError: the results can't be written into the run folder.
    """
    run = open_run(run.path if isinstance(run, Run) else run)
    check_writable(run.path, COPY_IT)
    recipe = read_recipe(run)[1]
    changes: dict[str, Any] = {
        "data_dir": data_dir, "workers": workers, "probe_views": probe_views, "download": False,
    }  # fmt: skip
    recipe = dataclasses.replace(recipe, **{key: value for key, value in changes.items() if value is not None})
    place = pick_device(device)
    encoder, projection = load_encoder(run.path).to(place), load_projection(run).to(place)
    results: dict[str, Any] = {"knn": None, "linear": None, "epoch": recipe.epochs, "split": None}
    if splits is None:
        splits = load_splits(recipe, say)
        changed = describe_change(read_fingerprint(run), splits)
        if changed:
            say(
                f"warning: the data has changed since {run.path} was trained, so these are not the run's own results: "
                f"{changed}. Images that it was trained on may be among those it is evaluated on now"
            )
            results["data_changed"] = changed
        if recipe.data_dir is not None and (changed or data_dir is not None) and _reads_folder(recipe):
            results["data_dir"] = printable(str(recipe.data_dir.expanduser().absolute()))
    arrays: dict[str, Tensor] = {}
    gallery, queries = splits.train or splits.pretrain, splits.test
    broken: list[Skipped] = []
    features, labels = _features(encoder, gallery, recipe, place, broken)
    gallery = _without(gallery, broken)
    query_features = None
    if queries is not None and labels is not None:
        query_features, query_labels = _features(encoder, queries, recipe, place, broken)
        queries = _without(queries, broken)
        splits = dataclasses.replace(splits, train=gallery, test=queries)
        assert query_labels is not None
        results |= _accuracies(features, labels, query_features, query_labels, recipe)
        if recipe.probe_views:
            views = _features_of_views(encoder, gallery, recipe, place)
            probe = linear_probe(features, labels, query_features, query_labels, seed=recipe.seed, views=views)
            results |= {"linear_views": probe.accuracy, "linear_views_protocol": probe.protocol}
        results |= {"split": splits.split, "train_samples": len(gallery), "test_samples": len(queries)}
        results["classes"] = len(splits.classes)
        if len(splits.classes) <= FEW_CLASSES:
            results["class_names"] = [printable(name) for name in splits.classes]
        if recipe.baselines:
            results["raw_pixels"] = _baseline(nn.Flatten(), splits, recipe, place)
            torch.manual_seed(recipe.seed)  # as in training, so this is what training started from
            results["untrained"] = _baseline(EncoderConfig.read(run).build().to(place), splits, recipe, place)
    else:
        unused = [name for name in ("probe_views", "baselines") if getattr(recipe, name)]
        if unused:
            have = "have" if len(unused) > 1 else "has"
            say(f"warning: without labels there is no linear probe, and {' and '.join(unused)} {have} no part")
    geometry, distances = _geometry(nn.Sequential(encoder, projection), queries or gallery, recipe, place)
    results |= geometry
    results["skipped_images"] = len(splits.skipped) + len(broken)
    if broken:
        files = summarise_skipped(broken)
        say(f"warning: {len(broken)} image(s) can't be decoded and are left out of the evaluation: {files}")
    arrays |= distances | _neighbours(features, query_features, gallery, queries, recipe)
    back_up_json(run.results, results)
    write_atomically(run.arrays, lambda path: save_file(arrays, path))
    write_json(run.results, results)
    return results


def load_splits(recipe: Recipe, say: Callable[[str], None] | None = None) -> Splits:
    """The data of a recipe; ``say`` is told of images and folders that are left out, and of a folder without a part."""
    if say is not None and recipe.data_dir is not None and not _reads_folder(recipe):
        say(f"warning: data_dir ({recipe.data_dir}) has no part in {recipe.dataset}, which needs no files")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*and are skipped")  # they are told below
        splits = load_images(
            recipe.dataset,
            recipe.data_dir,
            size=recipe.views.size,
            download=recipe.download,
            validation=recipe.validation,
            seed=recipe.seed,
            memory_limit=round(recipe.memory_gib * 2**30),
            checksum=recipe.checksum,
            exclude=exclude_runs,
        )
    if splits.skipped and say is not None:
        files = summarise_skipped(splits.skipped)
        say(f"warning: {len(splits.skipped)} image(s) can't be read and are left out: {files}")
    if splits.left_out and say is not None:
        say(f"warning: folders in {recipe.data_dir} are left out: {summarise_skipped(splits.left_out)}")
    return splits


def _reads_folder(recipe: Recipe) -> bool:
    return dataset_info(recipe.dataset).needs_folder


def knn_monitor(recipe: Recipe, splits: Splits, device: torch.device) -> Callable[[nn.Module], float] | None:
    """A function that gives an encoder's k-NN accuracy in percent; None where the data has no labels."""
    train, test = splits.train, splits.test
    if train is None or test is None:
        return None

    half = device.type == "cuda" and recipe.precision != "32" and torch.cuda.is_bf16_supported()

    def accuracy(encoder: nn.Module) -> float:
        # As in training; the evaluation after it is in 32 bit.
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            x, labels = _features(encoder, train, recipe, device)
            y, answers = _features(encoder, test, recipe, device)
        assert labels is not None
        assert answers is not None
        return knn_accuracy(x, labels, y, answers, k=min(recipe.k, len(x)))

    return accuracy


def _features(
    encoder: nn.Module,
    samples: Samples,
    recipe: Recipe,
    device: torch.device,
    broken: list[Skipped] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Features and labels of the samples that can be decoded; the others are added to ``broken``."""
    views = recipe.views
    batches = evaluation_batches(
        samples,
        size=views.size,
        mean=views.mean,
        std=views.std,
        batch_size=_batch_size(recipe, device),
        device=device,
        workers=recipe.workers,
        skipped=[] if broken is None else broken,
    )
    return extract_features(encoder, batches, device)


def images_at_once(size: int, device: torch.device, views: int = 0) -> int:
    """How many images of a side go through an encoder together, without gradients.

    Args:
        size: their side in pixels.
        device: where.
        views: how many go through it in a training step, where there is one: that many small ones a GPU takes.

    Example:
        >>> [images_at_once(size, torch.device("cpu")) for size in (32, 224)]
        [512, 10]
        >>> [images_at_once(size, torch.device("cuda")) for size in (32, 224)]
        [512, 167]
    """
    if device.type == "cuda":
        small = max(EVALUATION_BATCH, min(GPU_PIXELS // size**2, views))
        return max(1, min(small, max(GPU_LARGE // size**2, views)))
    return max(1, min(EVALUATION_BATCH, EVALUATION_PIXELS // size**2))


def _batch_size(recipe: Recipe, device: torch.device) -> int:
    return images_at_once(recipe.views.size, device, recipe.multiplicity * recipe.batch_size)


def _features_of_views(
    encoder: nn.Module, samples: Samples, recipe: Recipe, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Features of random crops and flips of all samples, as in training but with their own colours; and whose they are.

    Samples that don't fill a last batch make one of their own.
    """
    family = dataclasses.replace(recipe.views, jitter=0.0, grey=0.0, blur=0.0, solarise=0.0)
    number, made = recipe.probe_views, max(2, recipe.probe_views)  # a stream has two views at least
    batch = min(max(1, _batch_size(recipe, device) // made), len(samples))
    stream = ViewStream(
        samples, (family, family), batch, seed=recipe.seed, device=device, workers=recipe.workers,
        multiplicity=made, report=lambda _: None,
    )  # fmt: skip
    owners: list[Tensor] = []

    def batches() -> Iterator[tuple[Tensor, None]]:
        for first, others, index in stream:
            owners.append(index.repeat(number))
            yield torch.cat([first, others])[: number * batch], None

    features, _ = extract_features(encoder, batches(), device)
    owner = torch.cat(owners)
    done = {*owner.tolist(), *stream.undecodable}
    rest = [i for i in range(len(samples)) if i not in done]
    if not rest:
        return features, owner
    more, whose = _features_of_views(encoder, samples.select(rest), recipe, device)
    return torch.cat([features, more]), torch.cat([owner, torch.tensor(rest, device=owner.device)[whose]])


def _without(samples: Samples, broken: list[Skipped]) -> Samples:
    if not broken or not isinstance(samples, FileSamples):
        return samples
    gone = {skipped.path for skipped in broken}
    return samples.select([i for i, path in enumerate(samples.paths) if path not in gone])


def _accuracies(x: Tensor, labels: Tensor, y: Tensor, answers: Tensor, recipe: Recipe) -> dict[str, Any]:
    k = min(recipe.k, len(x))
    knn = knn_accuracy(x, labels, y, answers, k=k)
    probe = linear_probe(x, labels, y, answers, seed=recipe.seed)
    found: dict[str, Any] = {
        "knn": knn, "linear": probe.accuracy, "k": k, "linear_protocol": probe.protocol,
        "linear_weight_decay": probe.weight_decay,
    }  # fmt: skip
    return found if probe.top5 is None else {**found, "linear_top5": probe.top5}


def _baseline(encoder: nn.Module, splits: Splits, recipe: Recipe, device: torch.device) -> dict[str, float]:
    assert splits.train is not None
    assert splits.test is not None
    x, labels = _features(encoder, splits.train, recipe, device)
    y, answers = _features(encoder, splits.test, recipe, device)
    assert labels is not None
    assert answers is not None
    found = _accuracies(x, labels, y, answers, recipe)
    return {"knn": found["knn"], "linear": found["linear"]}


def _geometry(
    model: nn.Module, samples: Samples, recipe: Recipe, device: torch.device
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """How close the embeddings of two views of a sample are, and how spread all of them."""
    batch = min(EVALUATION_BATCH, _batch_size(recipe, device), len(samples))
    stream = ViewStream(samples, recipe.view_pair, batch, seed=recipe.seed, device=device, workers=recipe.workers)
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for pair in islice(stream, PAIRS // batch):
        for views, embeddings in zip((pair.first, pair.second), found, strict=True):
            embeddings.append(extract_features(model, [(views, None)], device)[0])
    x, y = (nn.functional.normalize(torch.cat(embeddings), dim=1) for embeddings in found)
    geometry = {"alignment": alignment(x, y), "uniformity": uniformity(x), "effective_rank": effective_rank(x)}
    distances = pair_distances(x, y, seed=recipe.seed)
    return geometry, {"positive": distances.positive.cpu(), "negative": distances.negative.cpu()}


def _neighbours(
    features: Tensor,
    query_features: Tensor | None,
    gallery: Samples,
    queries: Samples | None,
    recipe: Recipe,
) -> dict[str, Tensor]:
    """Pictures of a few samples and of the training samples nearest to them."""
    own = query_features is None or queries is None
    asked, pool = (features, gallery) if own else (query_features, queries)
    assert asked is not None
    assert pool is not None
    generator = torch.Generator().manual_seed(recipe.seed)
    chosen = torch.randperm(len(asked), generator=generator)[:QUERIES]
    count = min(NEIGHBOURS, len(features) - int(own))
    if count < 1:
        return {}
    # Where the queries are in the gallery themselves, each is its own nearest neighbour and is left out.
    found = nearest_neighbours(features, asked[chosen.to(asked.device)], count + int(own))
    indices, similarity = found.indices[:, int(own) :], found.similarities[:, int(own) :]
    rows = torch.stack([display_images(gallery, row, recipe.views.size) for row in indices])
    shown = torch.cat([display_images(pool, chosen, recipe.views.size).unsqueeze(1), rows], dim=1)
    return {"neighbour_images": shown.contiguous(), "neighbour_similarity": similarity.cpu().contiguous()}
