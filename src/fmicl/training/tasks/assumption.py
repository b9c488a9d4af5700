"""Test of the paper's assumption on a run's own positive pairs: assumption.json and a figure in the run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fmicl.information.assumption import AssumptionCheck, check_assumption
from fmicl.runs.export import load_encoder, load_projection
from fmicl.runs.figures import assumption_figure
from fmicl.runs.folder import READ_ONLY_HINT, Run, open_run
from fmicl.runs.settings import read_settings
from fmicl.training.tasks.image_evaluation import positive_pairs
from fmicl.training.tasks.image_parts import load_splits
from fmicl.utils.device import pick_device
from fmicl.utils.files import back_up_json, check_writable, write_json
from fmicl.utils.provenance import command_line, commit, versions


def check_run(
    run: Run | Path,
    *,
    data_dir: Path | None = None,
    pairs: int = 4096,
    flow_steps: int = 1000,
    device: str = "auto",
    say: Callable[[str], None] = print,
) -> tuple[AssumptionCheck, Path]:
    """Embed two views of held-out images as in training, test the assumption, and write assumption.json and a figure.

    Passes over the images are repeated, with other views, until there are ``pairs``; the test of the cosines uses the
    first pass. An earlier assumption.json that differs is kept under another name.

    Args:
        run: the run folder, of images.
        data_dir: the folder of the data, if it has moved.
        pairs: positive pairs, about.
        flow_steps: training steps of each flow at most.
        device: where the embeddings are computed.
        say: prints what is being done, and warnings.

    Returns:
        The results, and the path of the figure.

    Raises:
        FileNotFoundError: the run has no encoder yet, or the data doesn't exist.
        PermissionError: the run folder can't be written to.
        ValueError: it is a run on text, or has too few images.
    """
    run = open_run(run.path if isinstance(run, Run) else run)
    settings = read_settings(run, "images").replace(download=False)
    if pairs < 100 or flow_steps < 1:
        raise ValueError(f"needs at least 100 pairs and 1 step, got {pairs} and {flow_steps}")
    check_writable(run.path, READ_ONLY_HINT)
    if data_dir is not None:
        settings = settings.replace(data_dir=data_dir)
    place = pick_device(device)
    model = nn.Sequential(load_encoder(run.path), load_projection(run)).to(place)
    splits = load_splits(settings, say)
    samples = splits.test or splits.train or splits.pretrain
    found = [positive_pairs(model, samples, settings, place, pairs)]
    distinct = len(found[0][0])
    while sum(len(x) for x, _ in found) + distinct <= pairs:
        found.append(positive_pairs(model, samples, settings, place, pairs, epoch=len(found)))
    x, y = (torch.cat(parts).cpu() for parts in zip(*found, strict=True))
    check = check_assumption(
        x, y, distinct=distinct, flow_steps=flow_steps, seed=settings.seed, progress=lambda what: say(f"{what} ...")
    )
    record = check.record() | {
        "distinct": distinct, "command": command_line(), "versions": versions(["torch"]), "commit": commit(),
        "device": str(place), "seed": settings.seed,
    }  # fmt: skip
    back_up_json(run.assumption, record)
    write_json(run.assumption, record)
    return check, assumption_figure(check, run.figures / "assumption.png")
