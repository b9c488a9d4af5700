"""Training on a text file: tokens, sentence encoder, STS-B dev during training, export and STS scores."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fmicl.config import Settings
from fmicl.data import LONG_LINE, LineReader, SentenceStream, describe_text_change, tokenise_file
from fmicl.evaluation.sts import StsTask, load_sts, load_stsb
from fmicl.methods import Method
from fmicl.models.text import (
    SentenceEncoder,
    Tokenizer,
    build_sentence_encoder,
    check_model_path,
    declared_length_limit,
    has_dropout,
    nested_modules,
    save_sentence_encoder,
    sentence_head,
)
from fmicl.runs.export import contiguous_state_dict
from fmicl.runs.folder import Run
from fmicl.runs.tables import print_sts
from fmicl.training.callbacks import COLLAPSED_UNIFORMITY
from fmicl.training.memory import BatchDescription
from fmicl.training.tasks.base import Context, Monitor, Task
from fmicl.training.tasks.text_evaluation import evaluate_text, stsb_scorer, write_text_results
from fmicl.utils.extras import how_to_install
from fmicl.utils.files import read_json, write_atomically, write_json


class TextTask(Task):
    """Training on a file of sentences; dropout makes the two views of each.

    The run folder is one of sentence-transformers too: ``SentenceTransformer(RUN)`` loads the encoder. With the option
    ``sts`` it is the one with the best score on STS-B dev of all that were measured; otherwise the last one.
    """

    unit = "sentences"

    encoder: SentenceEncoder
    stream: SentenceStream

    def __init__(self, settings: Settings, context: Context) -> None:
        super().__init__(settings, context)
        LineReader(settings.data)  # is it there, and text?
        self.dev: StsTask | None = None
        if settings.sts is not None:
            self.dev = load_stsb(settings.sts, "dev")
            load_sts(settings.sts)  # scored at the end, but errors are reported before training
        self.encoder, self.tokenizer = build_sentence_encoder(settings.model, settings.pooling)
        check_lengths(settings, self.tokenizer.limit)
        self.length = settings.encode_length or self.tokenizer.limit
        self.sentences = tokenise_file(
            settings.data,
            lambda lines: self.tokenizer.encode(lines, settings.length),
            self.tokenizer.state(),
            settings.length,
            cache=settings.cache_dir,
            say=context.say,
        )
        self.stream = SentenceStream(
            self.sentences,
            settings.batch_size // context.processes.world_size,
            length=settings.length,
            seed=settings.seed,
            device=context.device,
            rank=context.processes.rank,
            world_size=context.processes.world_size,
            fixed=context.device.type == "cuda",
        )
        self.row_batches = settings.sts_every * settings.accumulate

    @classmethod
    def check(cls, settings: Settings, *, local: bool = True) -> None:
        """Method, objective, packages, and whether text and model are named and there."""
        if settings.method_options.feature_maps:
            raise ValueError(
                f"method {settings.method} needs feature maps of images, which sentences don't have: take another "
                "--method, such as cpc"
            )
        settings.objective_options.build(settings.objective_context())
        for package in ("transformers", "sentence_transformers"):
            if find_spec(package) is None:  # what is imported at the end of a run must be there at its start
                raise ModuleNotFoundError(f"there is no package {package}: {how_to_install('text')}", name=package)
        if settings.data is None:
            raise ValueError("no text to train on: name a file with a sentence per line with --data FILE")
        if local:
            check_model_path(settings.model)
            for path in (settings.data, settings.sts):
                if path is not None and not path.exists():
                    raise FileNotFoundError(f"there is no {'file' if path.suffix else 'folder'} {path}")
        check_lengths(settings, declared_length_limit(settings.model))

    def fingerprint(self) -> dict[str, Any]:
        """Digests of the text and of STS-B dev, which chooses the encoder."""
        return {**self.sentences.fingerprint, "stsb_dev": None if self.dev is None else _digest(self.dev)}

    def data_changes(self, before: dict[str, Any] | None) -> str:
        """Which of them changed."""
        return describe_text_change(before, now=self.fingerprint())

    def build_method(self) -> Method:
        """The method around the encoder; embeddings have the encoder's width."""
        return build_text_method(self.settings, self.encoder)

    def example_views(self, n: int) -> Tensor:
        """Sentences of the longest length."""
        return torch.zeros(n, self.stream.longest, dtype=torch.int32)

    def batch_description(self) -> BatchDescription:
        """With the options that make a sentence smaller."""
        return BatchDescription(self.settings.batch_size, 2, "a smaller --model or --length needs less as well")

    def embedding_dim(self) -> int:
        """The encoder's width."""
        return self.encoder.num_features

    def start_lines(self) -> list[str]:
        """Sizes, and a warning if the encoder has no dropout."""
        sentences = self.sentences
        lines = [f"{len(sentences)} sentences, {len(sentences.ids)} tokens; {sentences.blank} blank line(s) skipped"]
        if sentences.long:
            lines.append(
                f"warning: {sentences.long} line(s) of {self.settings.data} have more than {LONG_LINE:,} characters, "
                f"of which the first {self.settings.length} tokens are trained on: a line is one sentence"
            )
        if not has_dropout(self.encoder):
            lines.append(
                f"warning: {self.settings.model} has no dropout, which makes the two views of a sentence: they are "
                "identical, and the loss can only push sentences apart. Set it in the model's config.json"
            )
        return lines

    def monitor(self) -> Monitor:
        """The score on STS-B dev, which chooses the encoder."""
        if self.dev is None:
            return Monitor("stsb_dev")
        return StsMonitor(stsb_scorer(self.dev, self.tokenizer, self.length, self.context.device))

    def finish(self, run: Run, method: Method, monitor: Monitor) -> None:
        """Export the best encoder on STS-B dev, or the last one; score it on the STS tasks."""
        chosen = monitor.load_best(method)
        if chosen is not None:
            why = f"the best on STS-B dev, {chosen['stsb_dev']:.2f}"
        else:
            steps = -(-self.settings.epochs * len(self.stream) // self.settings.accumulate)
            chosen = {"step": steps, "stsb_dev": None, "chosen_by": "last step"}
            why = (
                "the last one, since no --sts names a development set to choose by"
                if self.settings.sts is None
                else "the last one, since no encoder had a score on STS-B dev: its embeddings are all alike"
            )
        self.context.say(f"step {chosen['step']} is exported: {why}")
        export_text(run, self.encoder, method.projection, self.tokenizer, self.length)
        scores = None
        if self.settings.sts is not None:
            self.context.say("trained; now the STS tasks")
            scores = evaluate_text(run.path, self.settings.sts, device=self.settings.device, bar=True)
            uniformity = (scores or {}).get("uniformity")
            if uniformity is not None and uniformity > COLLAPSED_UNIFORMITY:
                context = self.settings.objective_context(self.embedding_dim())
                self.context.say(
                    f"warning: the sentence vectors have collapsed: on STS-B their uniformity is {uniformity:.3f}. "
                    f"{self.settings.objective_options.collapse_advice(context)}"
                )
        write_text_results(run, scores, chosen)

    @classmethod
    def print_results(cls, run: Run) -> None:
        """STS scores if there are any, and how to load the encoder."""
        results = read_json(run.results)
        if "pairs" in results:
            print_sts(results)
        print(f"encoder: SentenceTransformer({str(run.path)!r})")


class StsMonitor(Monitor):
    """The score on STS-B dev during training, and the weights of the best encoder.

    The best weights are part of the state, and so of each checkpoint: a run that is resumed has the score and the
    weights of the same step.

    Args:
        scorer: gives an encoder's score in percent, None if it has none.
    """

    def __init__(self, scorer: Callable[[nn.Module], float | None]) -> None:
        super().__init__("stsb_dev")
        self.scorer = scorer
        self.best: dict[str, Any] = {}

    def due(self, epoch: float) -> bool:  # noqa: ARG002
        """At the end of each row."""
        return True

    def measure(self, method: Method, step: int) -> float | None:
        """The score; the weights are kept if it is the best so far."""
        score = self.scorer(method.encoder)
        if score is not None and (not self.best or score > self.best["stsb_dev"]):
            weights, head = (
                {name: value.detach().clone() for name, value in part.state_dict().items()}
                for part in (method.encoder, method.projection)
            )
            self.best = {"step": step, "stsb_dev": score, "weights": weights, "head": head}
        return score

    def state(self) -> dict[str, Any]:
        """The best score and weights."""
        return {"best": self.best}

    def restore(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.best = dict(state["best"])

    def load_best(self, method: Method) -> dict[str, Any] | None:
        """Load the best weights into encoder and head, and describe them for results.json; None if none had a score."""
        if not self.best:
            return None
        method.encoder.load_state_dict(self.best["weights"])
        method.projection.load_state_dict(self.best["head"])
        return {"step": self.best["step"], "stsb_dev": self.best["stsb_dev"], "chosen_by": "STS-B dev"}


def build_text_method(settings: Settings, encoder: SentenceEncoder) -> Method:
    """The method of the settings around a sentence encoder; embeddings have the encoder's width."""
    width = encoder.num_features
    spread = float(getattr(encoder.model.config, "initializer_range", 0.02))
    objective = settings.objective_options.build(settings.objective_context(width))
    return settings.method_options.build(
        encoder,
        objective,
        dim=width,
        hidden=settings.hidden,
        projection=sentence_head(settings.pooling, width, spread),
    )


def check_lengths(settings: Settings, limit: int) -> None:
    """Refuse sentences of more tokens than a model takes.

    Raises:
        ValueError: length or encode_length is above the limit.
    """
    for name in ("length", "encode_length"):
        length = getattr(settings, name)
        if length is not None and length > limit:
            raise ValueError(f"{name} is {length}, but {settings.model} takes at most {limit} tokens")


def export_text(run: Run, encoder: SentenceEncoder, projection: nn.Module, tokenizer: Tokenizer, length: int) -> None:
    """Write RUN/sentence_transformer, and what makes RUN itself one; the head, if there is one, as safetensors."""
    head = contiguous_state_dict(projection)
    if head:
        write_atomically(run.projection, lambda path: save_file(head, path))
    save_sentence_encoder(encoder, tokenizer, length, run.sentence_transformer)
    name = "config_sentence_transformers.json"
    write_atomically(run.path / name, lambda path: path.write_bytes((run.sentence_transformer / name).read_bytes()))
    write_json(run.modules, nested_modules(run.path, run.sentence_transformer))


def _digest(task: StsTask) -> str:
    return hashlib.blake2b(repr((task.first, task.second, task.scores)).encode(), digest_size=16).hexdigest()
