"""Optional dependencies: which extra brings a package, and how to install it."""

from __future__ import annotations

_EXTRAS = {
    "train": "jinja2 lightning matplotlib numpy PIL pyarrow rich safetensors sklearn tensorboard timm torchvision tyro",
    "text": "datasets sentence_transformers transformers",
}


def how_to_install(extra: str) -> str:
    """The command that installs an extra; fmicl is on no package index.

    Example:
        >>> how_to_install("train")
        "pip install -e '.[train]' in the folder of fmicl's clone"
    """
    return f"pip install -e '.[{extra}]' in the folder of fmicl's clone"


def missing_package(error: ModuleNotFoundError) -> tuple[str, str] | None:
    """The missing package of an extra and how to install it; None if no extra brings the module.

    Example:
        >>> missing_package(ModuleNotFoundError(name="timm.layers"))
        ('timm', "pip install -e '.[train]' in the folder of fmicl's clone")
    """
    package = (error.name or "").partition(".")[0]
    extra = next((extra for extra, packages in _EXTRAS.items() if package in packages.split()), None)
    return None if extra is None else (package, how_to_install(extra))
