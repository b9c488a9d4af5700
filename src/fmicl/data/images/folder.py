"""Dataset of any folder of image files, with or without class subfolders."""

from __future__ import annotations

import statistics
from pathlib import Path

from fmicl.data.images.decoding import check_images
from fmicl.data.images.listing import Listing, class_folders, load_listing
from fmicl.data.images.registry import Exclude, LoadRequest, register_dataset
from fmicl.data.images.samples import Skipped, summarise_skipped
from fmicl.data.images.search import image_paths, subfolders
from fmicl.data.images.splits import Splits, split_by_name

HELD_OUT = 0.1
"""Share of the labelled images that is held out where there is no test folder."""
TEST_FOLDERS = ("test", "val", "valid", "validation")
"""Folders that are the test split if train/ is beside them."""
SURVEYED = 1000
"""Images whose size is read for the median of a folder."""


@register_dataset("images", summary="Any folder of images, with or without class subfolders.", is_folder=True)
def load_folder(request: LoadRequest) -> Splits:
    """Any folder of images.

    - At least two subfolders with images: each is a class (with whatever is further down in it), and about a tenth of
      each class is held out for evaluation, by file name (see :func:`fmicl.data.split_by_name`). Images beside the
      class folders are unlabelled: the encoder is trained on them too, and evaluation leaves them out.
    - ``train/`` and ``test/`` (or ``val/``), in upper or lower case: the splits, with a folder for each class in both.
    - Otherwise all images are unlabelled, at whatever depth, and there is nothing to evaluate on.

    Raises:
        FileNotFoundError: there is no readable image.
        ValueError: there are classes, but too few readable images to evaluate on.
    """
    return load_listing(list_folder(request.root, request.exclude), request)


def survey_folder(root: Path, exclude: Exclude | None = None) -> tuple[int, int]:
    """Number of training images in a folder, and the median length of their shorter sides.

    No image is decoded. The median is that of up to 1,000 evenly spaced files; those that can't be read don't count.

    Raises:
        FileNotFoundError: there is no readable image.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> for side in (30, 40, 50):
        ...     Image.new("L", (side, 60)).save(folder / f"{side}.png")
        >>> survey_folder(folder)
        (3, 40)
    """
    paths = list_folder(root, exclude).paths
    shapes, skipped = check_images(paths[:: -(-len(paths) // SURVEYED)])
    if not shapes:
        raise FileNotFoundError(f"{root} has no image that can be read: {summarise_skipped(skipped)}")
    return len(paths), round(statistics.median(min(shape) for shape in shapes.values()))


def list_folder(root: Path, exclude: Exclude | None = None) -> Listing:
    """The image files of a folder, and their classes and splits as :func:`load_folder` describes them.

    Raises:
        FileNotFoundError: there is no image.
        ValueError: an image of train/ or test/ is in no class folder, or a test class is no training class.
    """
    folders = {f.name.lower(): f for f in subfolders(root)}
    test = next((name for name in TEST_FOLDERS if name in folders), None)
    if test is not None and "train" in folders:
        return class_folders(folders["train"], folders[test], exclude)
    left_out: list[Skipped] = []
    paths = image_paths(root, left_out, exclude)
    classes = sorted({p.relative_to(root).parts[0] for p in paths if p.parent != root})
    if len(classes) < 2:
        return Listing(root, paths, [-1] * len(paths), left_out=left_out)
    index = {name: i for i, name in enumerate(classes)}
    paths.sort(key=lambda p: (p.parent == root, p))  # the labelled ones first
    labels = [-1 if p.parent == root else index[p.relative_to(root).parts[0]] for p in paths]
    # Split before any file is opened, so that a damaged one doesn't move the others.
    count = sum(label >= 0 for label in labels)
    names = [p.relative_to(root).as_posix() for p in paths[:count]]
    kept, held = split_by_name(names, labels[:count], HELD_OUT, "held-out")
    kept += range(count, len(paths))
    return Listing(
        root, [paths[i] for i in kept], [labels[i] for i in kept], tuple(classes), [paths[i] for i in held],
        [labels[i] for i in held], "held-out", left_out,
    )  # fmt: skip
