"""What all tests share."""

import os

import torch

# Triton decides at import whether its programs run on a GPU or in its interpreter, on the CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
