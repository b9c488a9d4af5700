"""Any folder of image files as a dataset, with or without class subfolders."""

from __future__ import annotations

from fmicl.data.images.listing import Listing, class_folders, load_listing
from fmicl.data.images.registry import LoadRequest, register_dataset
from fmicl.data.images.samples import Skipped
from fmicl.data.images.search import image_paths, subfolders
from fmicl.data.images.splits import Splits, split_by_name

HELD_OUT = 0.1
"""Share of the labelled images that is held out where there is no test folder."""
TEST_FOLDERS = ("test", "val", "valid", "validation")
"""Folders that are the test split if train/ is beside them."""


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
    root = request.root
    folders = {f.name.lower(): f for f in subfolders(root)}
    test = next((name for name in TEST_FOLDERS if name in folders), None)
    if test is not None and "train" in folders:
        return load_listing(class_folders(folders["train"], folders[test], request), request)
    left_out: list[Skipped] = []
    paths = image_paths(root, left_out, request.exclude)
    classes = sorted({p.relative_to(root).parts[0] for p in paths if p.parent != root})
    if len(classes) < 2:
        return load_listing(Listing(root, paths, [-1] * len(paths), left_out=left_out), request)
    index = {name: i for i, name in enumerate(classes)}
    paths.sort(key=lambda p: (p.parent == root, p))  # the labelled ones first
    labels = [-1 if p.parent == root else index[p.relative_to(root).parts[0]] for p in paths]
    # Split before any file is opened, so that a damaged one doesn't move the others.
    count = sum(label >= 0 for label in labels)
    names = [p.relative_to(root).as_posix() for p in paths[:count]]
    kept, held = split_by_name(names, labels[:count], HELD_OUT, "held-out")
    kept += range(count, len(paths))
    listing = Listing(
        root, [paths[i] for i in kept], [labels[i] for i in kept], tuple(classes), [paths[i] for i in held],
        [labels[i] for i in held], "held-out", left_out,
    )  # fmt: skip
    return load_listing(listing, request)
