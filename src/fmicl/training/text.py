"""From a text recipe to a run folder: tokens, encoder, method and trainer put together, trained, exported and scored.

It stands beside :mod:`fmicl.training.pipeline`, which does the same for images and has what both need.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from fmicl import how_to_install
from fmicl.config.text_recipes import TEXT_RECIPES, TextRecipe
from fmicl.data import LineReader, Sentences, SentenceStream, describe_text_change, tokenise_file
from fmicl.evaluation.sts import StsTask, load_sts, load_stsb
from fmicl.methods import Method, MoCoV3, method_class
from fmicl.models.text import (
    SentenceEncoder,
    Tokenizer,
    build_sentence_encoder,
    has_dropout,
    nested_modules,
    save_sentence_encoder,
    sentence_head,
)
from fmicl.runs.export import plain_weights
from fmicl.runs.folder import Run, check_place, old_run
from fmicl.training.building import method_options, optimisation_of
from fmicl.training.callbacks import COLUMNS, Guard, Recorder
from fmicl.training.objectives import build_objective, collapse_advice
from fmicl.training.pipeline import (
    beginning,
    check_fits,
    check_same,
    describe,
    fit,
    open_folder,
    quiet_lightning,
    report_overweight,
    report_unused,
    say,
)
from fmicl.training.processes import check_batch, resolve_processes
from fmicl.training.text_evaluation import evaluate_text, note_scores, stsb_scorer
from fmicl.utils.device import pick_device
from fmicl.utils.files import write_atomically, write_json


def train_text(
    recipe: TextRecipe, *, name: str = "wikipedia", out: Path | None = None, resume: bool = False
) -> Run | None:
    """Train a sentence encoder by a recipe, export it, score it if there is something to score it by, write the page.

    The run folder is one of sentence-transformers too: ``SentenceTransformer(RUN)`` loads the encoder. With
    ``recipe.sts``, that is the one with the best score on STS-B dev of all that were looked at; else the last one.

    Args:
        recipe: all settings.
        name: name of the recipe; the run folder is ``runs/<name>-001`` or the next free number.
        out: another folder for the run. It must not exist, unless the run is resumed.
        resume: go on with the run in ``out``, or with the newest of this name, to the same end as if it had never
            been cut off. Where nothing has been written yet, start.

    Returns:
        The run; None on all processes but the first, where several train together.

    Raises:
        FileExistsError: ``out`` exists.
        FileNotFoundError: the text, the model or the STS tasks aren't there.
        ValueError: settings that don't go together, a file that can't be used, a batch that doesn't fit into memory, or
            a resumed run that was started with others.
        fmicl.training.callbacks.NonFiniteError: the loss is not finite; the last good checkpoint is kept.
        fmicl.training.signals.Stopped: by Ctrl-C, SIGTERM or SIGHUP in training, which leave a checkpoint; a KeyboardInterrupt.
    """
    with quiet_lightning(), contextlib.ExitStack() as held:
        device, processes = pick_device(recipe.device), resolve_processes(recipe)
        _require_packages()
        if processes.rank == 0 and not resume:
            check_place(out)  # now, and not when the sentences have been read
        check_batch(recipe, processes.world_size)
        build_objective(recipe)  # wrong settings are found before anything is read and a folder made
        LineReader(recipe.text)  # is it there, and text?
        dev = None
        if recipe.sts is not None:
            dev = load_stsb(recipe.sts, "dev")
            load_sts(recipe.sts)  # they are scored at the end, but what is wrong with them is said now
        torch.manual_seed(recipe.seed)  # the same weights on all processes, and in all runs with this seed
        encoder, tokenizer = build_sentence_encoder(recipe.model, recipe.pooling)
        length = encode_length(recipe, tokenizer)
        sentences = _tokens(recipe, tokenizer, processes.rank)
        stream = SentenceStream(
            sentences,
            recipe.batch_size // processes.world_size,
            length=recipe.length,
            seed=recipe.seed,
            device=device,
            rank=processes.rank,
            world_size=processes.world_size,
            fixed=device.type == "cuda",
        )
        data = {**sentences.fingerprint, "stsb_dev": None if dev is None else _digest(dev)}
        old = old_run(name, out) if resume else None
        changed = functools.partial(describe_text_change, now=data)
        if old is not None and old.finished:  # all processes see this, and none of them waits for another
            check_same(old, recipe, changed)
            if processes.rank == 0:
                say(f"the run in {old.path} has ended already")
            return old if processes.rank == 0 else None
        method = build_text_method(recipe, encoder, len(stream))
        check_fits(recipe, method, lambda n: torch.zeros(n, stream.longest, dtype=torch.int32), device, processes)
        run = None
        if processes.rank == 0:
            run = held.enter_context(open_folder(recipe, name, out, old, str(device), data, changed))
            say(beginning(run, old, resume))
            say(f"{len(sentences)} sentences, {len(sentences.ids)} tokens; {sentences.blank} blank line(s) skipped")
            if not has_dropout(encoder):
                say(
                    f"warning: {recipe.model} has no dropout, which makes the two views of a sentence: they are the "
                    "same, and the loss can only drive sentences apart. Its config.json is where to set it"
                )
            report_unused(recipe, TEXT_RECIPES[name].recipe if name in TEXT_RECIPES else TextRecipe())
            report_overweight(recipe, encoder.num_features)
        scorer = None if dev is None or run is None else stsb_scorer(dev, tokenizer, length, device)
        guard = Guard(describe(method), None if run is None else run.checkpoint)
        recorder = TextRecorder(
            run,
            len(stream),
            every=recipe.sts_every * recipe.accumulate,
            total=recipe.epochs * len(stream),
            scorer=scorer,
            advice=collapse_advice(recipe, encoder.num_features),
            say=say,
            guard=guard,
        )
        fit(recipe, method, stream, run, device, processes, resume, recorder, guard, unit="sentences")
        if run is None:
            return None
        chosen = recorder.take_best(method)
        say(
            f"step {chosen['step']} is exported: "
            + (f"the best on STS-B dev, {chosen['stsb_dev']:.2f}" if recorder.best else _why_last(recipe))
        )
        export_text(run, encoder, method.projection, tokenizer, length)
        if recipe.sts is not None:
            say("trained; now the STS tasks")
        scores = None if recipe.sts is None else evaluate_text(run.path, recipe.sts, device=recipe.device, bar=True)
        note_scores(run, scores, chosen)
        from fmicl.runs.report import write_report

        write_report(run.path)
        return run


def encode_length(recipe: TextRecipe, tokenizer: Tokenizer) -> int:
    """Tokens of a sentence after training.

    Raises:
        ValueError: the model doesn't take as many as the recipe says, here or in training.
    """
    check_lengths(recipe, tokenizer.limit)
    return recipe.encode_length or tokenizer.limit


def check_lengths(recipe: TextRecipe, limit: int) -> None:
    """Refuse sentences of more tokens than a model takes."""
    for field, length in (("length", recipe.length), ("encode_length", recipe.encode_length)):
        if length is not None and length > limit:
            raise ValueError(f"{field} is {length}, but {recipe.model} takes no more than {limit} tokens")


def build_text_method(recipe: TextRecipe, encoder: SentenceEncoder, batches_per_epoch: int) -> Method:
    """The method of a recipe around a sentence encoder; embeddings have the encoder's own width."""
    width = encoder.num_features
    spread = float(getattr(encoder.model.config, "initializer_range", 0.02))
    kind = method_class(recipe.method)
    options: dict[str, Any] = method_options(recipe) | {"dim": width}
    if kind is MoCoV3:
        options["hidden"] = recipe.hidden
    return kind(
        encoder,
        build_objective(recipe),
        optimisation_of(recipe, batches_per_epoch),
        projection=sentence_head(recipe.pooling, width, spread),
        **options,
    )


def export_text(run: Run, encoder: SentenceEncoder, projection: nn.Module, tokenizer: Tokenizer, length: int) -> None:
    """Write RUN/sentence_transformer, and what makes RUN itself one; the head, if there is one, as safetensors."""
    head = plain_weights(projection)
    if head:
        write_atomically(run.projection, lambda path: save_file(head, path))
    save_sentence_encoder(encoder, tokenizer, length, run.sentence_transformer)
    name = "config_sentence_transformers.json"
    write_atomically(run.path / name, lambda path: path.write_bytes((run.sentence_transformer / name).read_bytes()))
    write_json(run.modules, nested_modules(run.path, run.sentence_transformer))


class TextRecorder(Recorder):
    """A row of metrics.csv each so many batches, with the score on STS-B dev; keeps the best encoder.

    The best weights are part of the record's state, and so of each checkpoint: a run that goes on has the score and the
    weights of the same step.

    Args:
        run: the folder, or None on all processes but the first.
        batches_per_epoch: length of an epoch.
        every: batches of a row; the last row of a run may have fewer.
        total: batches of the run.
        scorer: gives an encoder's score in percent, None if it has none; None looks at nothing.
        advice: what the warning of collapse says to do.
        say: where warnings go.
        guard: asked before the encoder is scored.
    """

    columns = tuple("stsb_dev" if name == "knn" else name for name in COLUMNS)
    tensorboard_every = 125

    def __init__(
        self,
        run: Run | None,
        batches_per_epoch: int,
        *,
        every: int,
        total: int,
        scorer: Callable[[nn.Module], float | None] | None,
        advice: str,
        say: Callable[[str], None],
        guard: Guard | None = None,
    ) -> None:
        super().__init__(run, batches_per_epoch, monitor=None, monitor_every=0, advice=advice, say=say, guard=guard)
        self.every, self.total, self.scorer = every, total, scorer
        self.best: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """The best encoder too."""
        return {**super().state(), "best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        """The best encoder too."""
        super().restore(state)
        self.best = dict(state["best"])

    def _span(self, batches: int) -> int:
        if batches % self.every and batches != self.total:
            return 0
        return (batches - 1) % self.every + 1

    def _epoch(self, method: Method) -> float:
        return round(method.batches / self.batches_per_epoch, 6)

    def _look(self, method: Method) -> float | None:
        if self.scorer is None:
            return None
        if self.guard is not None:
            self.guard.check(method)
        score = self.scorer(method.encoder)
        if score is not None and (not self.best or score > self.best["stsb_dev"]):
            weights, head = (
                {name: value.detach().clone() for name, value in part.state_dict().items()}
                for part in (method.encoder, method.projection)
            )
            self.best = {"step": method.step, "stsb_dev": score, "weights": weights, "head": head}
        return score

    def take_best(self, method: Method) -> dict[str, Any]:
        """Put the best weights into encoder and head, if some were found, and say which they are."""
        if not self.best:
            return {"step": method.step, "stsb_dev": None, "chosen_by": "last step"}
        method.encoder.load_state_dict(self.best["weights"])
        if "head" in self.best:  # which a checkpoint of an earlier version lacks
            method.projection.load_state_dict(self.best["head"])
        return {"step": self.best["step"], "stsb_dev": self.best["stsb_dev"], "chosen_by": "STS-B dev"}


def _require_packages() -> None:
    """What is imported at the end of a run must be there at its start.

    Raises:
        ModuleNotFoundError: it isn't; the command line says which extra brings it.
    """
    for package in ("transformers", "sentence_transformers"):
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"there is no package {package}: {how_to_install('text')}", name=package)


def _why_last(recipe: TextRecipe) -> str:
    if recipe.sts is None:
        return "the last one, as no --sts names a development set to choose by"
    return "the last one, as no encoder had a score on STS-B dev: its embeddings are all alike"


def _tokens(recipe: TextRecipe, tokenizer: Tokenizer, rank: int) -> Sentences:
    return tokenise_file(
        recipe.text,
        lambda lines: tokenizer.encode(lines, recipe.length),
        tokenizer.state(),
        recipe.length,
        cache=recipe.cache_dir,
        say=say if rank == 0 else lambda _: None,
    )


def _digest(task: StsTask) -> str:
    return hashlib.blake2b(repr((task.first, task.second, task.scores)).encode(), digest_size=16).hexdigest()
