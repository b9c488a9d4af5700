"""Devices that tests run on."""

from __future__ import annotations

import torch

TRITON_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""Where Triton runs in tests: a GPU, or the CPU by Triton's interpreter (see conftest.py)."""
