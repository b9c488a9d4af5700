"""Numbers of the paper (Lu et al., 2023), by table.

Accuracies are in percent; STS is Spearman's correlation times 100, averaged over seven tasks.
"""

from __future__ import annotations

from typing import Any

COLUMNS: dict[str, dict[str, Any]] = {
    "MoCo": {"method": "moco", "objective": "infonce"},
    "SimCLR": {"objective": "infonce"},
    "AU": {"objective": "align_uniform"},
    "KL": {"divergence": "kl"},
    "JS": {"divergence": "js"},
    "Pearson": {"divergence": "pearson"},
    "SH": {"divergence": "squared_hellinger"},
    "Tsallis": {"divergence": "tsallis"},
    "VLC": {"divergence": "vlc"},
}
"""The columns of the paper's large table, and the options of each."""
DIVERGENCES = {name: options for name, options in COLUMNS.items() if "divergence" in options}
"""Those of f-MICL."""


def _row(*values: float) -> dict[str, float]:
    return dict(zip(COLUMNS, values, strict=True))


LINEAR = {
    "cifar10": _row(90.30, 89.71, 90.41, 90.61, 89.66, 89.35, 89.52, 89.15, 89.13),
    "stl10": _row(83.69, 82.97, 84.44, 85.33, 85.94, 82.64, 82.80, 84.79, 85.94),
    "tinyimagenet": _row(35.72, 30.56, 41.20, 39.46, 42.98, 43.45, 40.83, 32.99, 38.65),
}
"""Linear probe after 800 epochs. TinyImageNet's KL is that of Table 2; Table 10 has RPC's there (docs/errata.md)."""
KNN = {
    "cifar10": _row(88.70, 84.92, 89.42, 89.34, 89.12, 89.44, 88.13, 89.18, 89.15),
    "stl10": _row(78.77, 74.34, 79.57, 79.99, 80.45, 76.64, 78.31, 76.11, 79.34),
    "tinyimagenet": _row(36.22, 29.60, 37.44, 36.17, 38.20, 38.14, 35.56, 33.11, 35.21),
}
"""k-NN after 800 epochs."""
STS = _row(77.88, 77.40, 77.95, 78.02, 76.76, 77.59, 73.60, 72.68, 55.07)
"""Wikipedia, BERT-base; the column SimCLR is SimCSE."""
COSINE = {"KL": 89.95, "JS": 88.06, "Pearson": 87.79, "SH": 87.06, "Tsallis": 88.55, "VLC": 10.00}
"""Linear probe on CIFAR-10 with the cosine similarity; LINEAR has the f-Gaussian row."""
IMAGENET = {
    "SwAV": 75.3, "BYOL": 74.3, "Barlow Twins": 73.2, "VICReg": 73.2, "RenyiCL": 76.2, "MoCo v3": 73.2, "KL": 73.9,
    "JS": 76.5, "Pearson": 74.6,
}  # fmt: skip
"""Linear probe on ImageNet; the first five are ResNet-50 numbers that the paper took from others."""
ALPHA_VISION = {
    "KL": {0.1: 13.16, 1.0: 77.60, 10.0: 83.53, 20.0: 83.77, 30.0: 81.39, 40.0: 84.19, 50.0: 82.77},
    "JS": {0.1: 8.84, 1.0: 73.31, 10.0: 81.39, 20.0: 83.21, 30.0: 83.49, 40.0: 84.06, 50.0: 82.61},
}
"""k-NN on CIFAR-10 after 200 epochs, by alpha."""
KL_ALPHA_1_800 = 83.58
"""k-NN on CIFAR-10 of KL at alpha 1 after 800 epochs."""
ALPHA_TEXT = {
    "KL": {1.0: 67.52, 10.0: 70.47, 1e2: 72.43, 1e3: 75.12, 1e4: 76.90, 1e5: 77.78, 409600.0: 78.02, 1e6: 77.78},
    "Pearson": {1.0: 64.58, 10.0: 67.78, 1e2: 71.58, 1e3: 74.03, 1e4: 74.95, 1e5: 74.40, 409600.0: 77.59, 1e6: 76.47},
}
"""STS average by alpha."""
