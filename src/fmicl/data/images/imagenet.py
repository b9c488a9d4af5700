"""ImageNet (ILSVRC 2012) as class folders."""

from __future__ import annotations

from fmicl.data.images.listing import class_folders, load_listing
from fmicl.data.images.registry import LoadRequest, register_dataset
from fmicl.data.images.splits import Splits


@register_dataset("imagenet", summary="ImageNet as class folders in train/ and val/.", is_folder=True)
def load_imagenet(request: LoadRequest) -> Splits:
    """ImageNet: ``train/n01440764/*.JPEG`` and ``val/n01440764/*.JPEG``, in the root or in a folder of its usual name.

    Raises:
        FileNotFoundError: train/ or val/ is missing or empty.
        ValueError: val/ is not sorted into classes, or has others than train/.
    """
    places = [request.root, *(request.root / name for name in ("imagenet", "ILSVRC2012", "ImageNet"))]
    root = next((place for place in places if (place / "train").is_dir()), request.root)
    for name in ("train", "val"):
        if not (root / name).is_dir():
            raise FileNotFoundError(
                f"no ImageNet in {request.root}: {root / name} is missing. Both train/ and val/ are needed, with a "
                f"folder for each class; ImageNet itself is available from https://image-net.org only."
            )
    return load_listing(class_folders(root / "train", root / "val", request.exclude), request)
