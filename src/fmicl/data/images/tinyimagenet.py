"""TinyImageNet in the layout of its archive."""

from __future__ import annotations

from pathlib import Path

from fmicl.data.images.listing import Listing, load_listing
from fmicl.data.images.registry import LoadRequest, register_dataset
from fmicl.data.images.samples import Skipped
from fmicl.data.images.search import image_paths, subfolders
from fmicl.data.images.splits import Splits

ARCHIVE = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


@register_dataset(
    "tinyimagenet", summary="TinyImageNet in its archive's layout: 110,000 images of 64 x 64.", is_folder=True
)
def load_tinyimagenet(request: LoadRequest) -> Splits:
    """TinyImageNet: ``train/n01443537/images/*.JPEG``, ``val/images``, ``val/val_annotations.txt``.

    Classes are in the order of their WordNet ids, and named by their first word in ``words.txt``.

    Raises:
        FileNotFoundError: a folder, a file, or an image that the annotations name is missing.
        ValueError: the annotations have an invalid line, or leave out images.
    """
    below = request.root / "tiny-imagenet-200"
    root = below if below.is_dir() and not (request.root / "train").is_dir() else request.root
    for needed in ("train", "val/images", "val/val_annotations.txt"):
        if not (root / needed).exists():
            raise FileNotFoundError(
                f"no TinyImageNet in {request.root}: {root / needed} is missing; get {ARCHIVE} and extract it there"
            )
    listed = root / "wnids.txt"
    ids = sorted(listed.read_text().split() if listed.is_file() else [f.name for f in subfolders(root / "train")])
    index = {name: i for i, name in enumerate(ids)}
    left_out: list[Skipped] = []
    paths: list[Path] = []
    labels: list[int] = []
    for name in ids:
        found = image_paths(root / "train" / name, left_out, request.exclude)
        paths += found
        labels += [index[name]] * len(found)
    test_labels = _annotations(root / "val", index)
    there = {p.name for p in image_paths(root / "val" / "images", left_out, request.exclude)}
    for missing in sorted(test_labels.keys() - there)[:1]:
        raise FileNotFoundError(f"{root / 'val/images' / missing} is missing, but val_annotations.txt names it")
    for extra in sorted(there - test_labels.keys())[:1]:
        raise ValueError(f"{root / 'val/images' / extra} has no line in val_annotations.txt: add one, or remove it")
    words = _words(root / "words.txt")
    listing = Listing(
        root, paths, labels, tuple(words.get(name, name) for name in ids),
        [root / "val" / "images" / name for name in test_labels], list(test_labels.values()), "val", left_out,
    )  # fmt: skip
    return load_listing(listing, request)


def _annotations(val: Path, index: dict[str, int]) -> dict[str, int]:
    """The labels of the validation images by file name, sorted."""
    path, labels = val / "val_annotations.txt", {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        columns = line.split("\t")
        if len(columns) < 2 or columns[1] not in index:
            raise ValueError(
                f"line {number} of {path} should be an image, a tab and a class of train/, but it is {line!r}: "
                f"extract the archive again"
            )
        labels[columns[0]] = index[columns[1]]
    return dict(sorted(labels.items()))


def _words(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    rows = (line.split("\t") for line in path.read_text().splitlines())
    return {row[0]: row[1].split(",")[0].strip() for row in rows if len(row) > 1}
