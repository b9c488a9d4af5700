"""Seeds of random number generators."""

from __future__ import annotations

import hashlib
import struct

import torch


def mix_seed(*numbers: int) -> int:
    """One seed in [0, 2^63) from several numbers: a hash, the same on every machine and in every process.

    Args:
        numbers: each in [0, 2^64).

    Example:
        >>> mix_seed(0, 1, 2) == mix_seed(0, 1, 2), mix_seed(0, 1, 2) == mix_seed(0, 2, 1)
        (True, False)
    """
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def seed_device(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of one device.

    torch.manual_seed seeds those of every kind of device, and for a kind that isn't initialised it formats a stack
    trace each time: in steps of a small network that is a good part of the time.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
