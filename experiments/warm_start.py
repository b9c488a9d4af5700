"""Pretraining of a small BERT: masked language modelling on sentences, in a fixed time on one GPU.

    python experiments/warm_start.py vocabulary wiki.txt VOCABULARY                              # minutes of CPU
    python experiments/warm_start.py tokens wiki.txt tokens.npz --vocabulary VOCABULARY          # minutes of CPU
    python experiments/warm_start.py train tokens.npz MODEL --vocabulary VOCABULARY --minutes 4  # the GPU's time

`train` takes the text itself too, and then does the second step first. MODEL is a plain transformers folder: the common
start of contrastive runs (`fmicl train wikipedia --model MODEL`) where no BERT weights can be had. What it is worth
before them says `fmicl evaluate MODEL --pooling cls --sts DIR`.

What a row is. Later the model sees single sentences: [CLS] at position 0, nothing else in sight. So it does here: whole
sentences are packed into rows of 128 tokens, each with its own [CLS] ... [SEP] and its positions from 0, and attention
stays inside a sentence. Rows of one sentence each, cut at 32 tokens, would show it the same, but much of them would be
padding, long sentences would lose their end, and positions from 32 on, which some STS sentences need, would never be
trained. Packed rows are almost full, and attention over 128 tokens costs few more operations.

What is masked is as in BERT and in transformers' DataCollatorForLanguageModeling: each token with probability 15 %, of
these 80 % become [MASK], 10 % a random token, 10 % stay. The vocabulary's 30,522 logits are computed there only.

Dropout while it trains is 0.1, in attention too, as in BERT (--dropout), and the saved config says the same whatever it
was: contrastive views are made by dropout, so the model should have met it.

How fast. Operations per token, forward and backward: 3 x 2 x (6 layers x 12 x 512^2 weights, 0.15 x 30,522 x 512 of the
vocabulary, 6 x 2 x 128 x 512 of attention) = 132 million. At 40 % of an H200's 770 TFLOP/s that is 2.3 million tokens a
second: 35 steps of 65,536, so 8,500 steps in 4 minutes, or 19 epochs of 1,000,000 sentences (28.5 million tokens). An
estimate, not a measurement: products of width 512 may reach half of that. A batch of 65,536 tokens, 9,000 of them
predicted, keeps the GPU busy and still leaves thousands of steps.

The learning rate follows the time used, so it ends at 0 on any machine (and two runs of one seed are alike, not equal).
As to its peak: BERT normalises after each block, and six such layers that start too fast learn token frequencies and no
more. None was compared at width 512, so 5e-4 is caution; a run that is no better by --give-up ends there.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import sentences
import torch
import torch.nn.functional as F
from sentences import Batch, Rows, make_batch, read_lines
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

DROPOUT = 0.1  # BERT's, of hidden states and of attention
WARM_UP = 0.1  # of the time
LOG_EVERY = 50  # steps between two looks at the loss, the only times that Python waits for the GPU
PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


# --- the model -----------------------------------------------------------------------------------------------------


def predict(model: BertForMaskedLM, seen: Tensor, look: Tensor, positions: Tensor, at: Tensor) -> Tensor:
    """Logits at the flat positions `at`, and nowhere else."""
    # one row of token types for all: its gradient is then a sum, and not 65,536 atomic additions to one address
    types = torch.zeros((1, seen.shape[1]), dtype=torch.long, device=seen.device)
    hidden = model.bert(seen, attention_mask=look, position_ids=positions, token_type_ids=types).last_hidden_state
    logits: Tensor = model.cls(hidden.flatten(0, 1)[at])
    return logits


def masked_loss(model: BertForMaskedLM, batch: Batch) -> Tensor:
    """BertForMaskedLM's own loss."""
    return F.cross_entropy(predict(model, *batch[:4]).float(), batch[4], ignore_index=-100)


# --- training --------------------------------------------------------------------------------------------------------


def schedule(fraction: float) -> float:
    """Share of the peak learning rate when this fraction of the time is used: up to 1, then down to 0, both linear."""
    return min(fraction / WARM_UP, max(0.0, 1 - fraction) / (1 - WARM_UP))


def held_out_scores(model: BertForMaskedLM, batches: list[Batch]) -> dict[str, Any]:
    """Accuracy and loss at masked tokens."""
    model.eval()  # type: ignore[no-untyped-call]
    right = loss = count = 0.0
    with torch.inference_mode():
        for batch in batches:
            logits, labels = predict(model, *batch[:4]).float(), batch[4]
            right += float((logits.argmax(1) == labels).sum())
            loss += float(F.cross_entropy(logits, labels, reduction="sum"))
            count += len(labels)
    model.train()
    return {"accuracy": right / count, "loss": loss / count, "masked_tokens": int(count)}


def unigram_scores(train: Tensor, special: Tensor, batches: list[Batch]) -> dict[str, Any]:
    """The same of a model that knows frequencies and no context: it always says the most frequent token."""
    counts = torch.bincount(train.flatten(), minlength=len(special)).double() * ~special
    labels = torch.cat([batch[4] for batch in batches])
    shares = (counts + 1) / (counts + 1).sum()
    accuracy = float((labels == counts.argmax()).double().mean())
    return {"token": int(counts.argmax()), "accuracy": accuracy, "loss": -float(shares[labels].log().mean())}


def train(options: argparse.Namespace, tokenizer: BertTokenizer, rows: tuple[Rows, Rows]) -> tuple[Any, Any]:
    """Train for `options.minutes`; give the model and the record of it."""
    device, width = options.device, options.positions
    cuda = device.startswith("cuda")
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    generator = torch.Generator(device).manual_seed(options.seed)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=options.width, num_hidden_layers=options.layers,
        num_attention_heads=options.heads, intermediate_size=4 * options.width, max_position_embeddings=width,
        hidden_dropout_prob=options.dropout, attention_probs_dropout_prob=options.dropout,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = BertForMaskedLM(config).to(device).train()
    parameters = sum(parameter.numel() for parameter in model.parameters())

    data = torch.from_numpy(rows[0].astype(np.int32)).to(device)  # all of it on the GPU
    options.batch = min(512, len(data)) if options.batch is None else options.batch
    if len(data) < options.batch:
        raise ValueError(f"a batch of {options.batch} rows is more than the {len(data)} there are: lower --batch")
    special = torch.zeros(len(tokenizer), dtype=torch.bool, device=device)
    special[tokenizer.all_special_ids] = True
    count = sentences.slots((~special[data]).sum(1).double(), options.batch, width)
    held_out = sentences.held_out_batches(rows[1], special, tokenizer)
    baseline = unigram_scores(data, special, held_out)
    baseline["token"] = tokenizer.convert_ids_to_tokens(baseline["token"])
    size = f"{parameters:,} parameters, {len(data):,} rows of {width} tokens"
    print(f"{size}; {options.held_out:,} lines are held out", flush=True)
    print(f"to beat: {in_words(baseline)}, by how often each token comes", flush=True)

    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98), eps=1e-6, fused=cuda)
    compiled = torch.compile(masked_loss, dynamic=False) if options.compile else masked_loss

    def gradients(index: Tensor) -> tuple[Tensor, Tensor]:
        chosen = data[index]
        batch = make_batch(chosen, special, tokenizer, count, generator)
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            loss = compiled(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=cuda)
        return loss.detach(), torch.count_nonzero(chosen != tokenizer.pad_token_id)

    started = time.perf_counter()
    float(gradients(torch.arange(options.batch, device=device))[0])  # compiles; what it learns is thrown away
    optimizer.zero_grad()
    compiling = time.perf_counter() - started

    curve, scores = list[dict[str, Any]](), list[dict[str, Any]]()
    step, tokens, total = 0, torch.zeros((), dtype=torch.long, device=device), torch.zeros((), device=device)
    order, at = torch.randperm(len(data), generator=generator, device=device), 0
    started = time.perf_counter()
    while (fraction := (time.perf_counter() - started) / (60 * options.minutes)) < 1:
        if at + options.batch > len(order):
            order, at = torch.randperm(len(data), generator=generator, device=device), 0
        for group in optimizer.param_groups:
            group["lr"] = options.lr * schedule(fraction)
        loss, seen = gradients(order[at : at + options.batch])
        optimizer.step()
        optimizer.zero_grad()
        at, step, tokens, total = at + options.batch, step + 1, tokens + seen, total + loss
        if step % LOG_EVERY == 0:
            mean, total = float(total) / LOG_EVERY, torch.zeros_like(total)
            if not math.isfinite(mean):
                raise ValueError(f"the loss is {mean} after {step} steps: take a smaller --lr than {options.lr}")
            curve.append({"step": step, "fraction": round(fraction, 4), "loss": round(mean, 4)})
            if fraction > 0.1 * (len(scores) + 1):
                scores.append({"step": step, **held_out_scores(model, held_out)})
                if fraction > options.give_up and scores[-1]["loss"] >= baseline["loss"]:
                    raise ValueError(f"no better than token frequencies after {step} steps: take a smaller --lr")
                print(f"{fraction:4.0%}  step {step}  loss {mean:.3f}  held out: {in_words(scores[-1])}", flush=True)
    tokens_seen = int(tokens)
    seconds = time.perf_counter() - started
    scores.append({"step": step, **held_out_scores(model, held_out)})
    print(f"100%  step {step}  {tokens_seen / seconds:,.0f} tokens/s  held out: {in_words(scores[-1])}")
    return model, {
        "parameters": parameters, "steps": step, "tokens_seen": tokens_seen, "seconds": seconds,
        "tokens_per_second": tokens_seen / seconds, "epochs": step * options.batch / len(data),
        "compile_seconds": compiling, "held_out": scores[-1], "unigram_baseline": baseline, "loss_curve": curve,
        "held_out_curve": scores,
    }  # fmt: skip


# --- the command line ------------------------------------------------------------------------------------------------


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which gets its name when all is in it; nothing is left of one that failed."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        refuse_existing(folder)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists and is not overwritten: take another name")


def save(folder: Path, model: BertForMaskedLM, tokenizer: BertTokenizer, record: dict[str, Any], dtype: str) -> None:
    """A transformers folder, and warm_start.json."""
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = DROPOUT
    tokenizer.model_max_length = model.config.max_position_embeddings
    with new_folder(folder) as inside:
        model.to(getattr(torch, dtype)).save_pretrained(inside)
        tokenizer.save_pretrained(inside)
        (inside / "warm_start.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def in_words(scores: Mapping[str, Any]) -> str:
    return f"loss {scores['loss']:.3f}, {scores['accuracy']:.1%} of masked tokens right"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    vocabulary = steps.add_parser("vocabulary", help="train a WordPiece vocabulary")
    tokens = steps.add_parser("tokens", help="tokenise and pack a text ahead of training")
    training = steps.add_parser("train", help="train a BERT on masked tokens")
    training.add_argument("text", type=Path, help="sentences, one a line, or the .npz file that `tokens` made of them")
    for step in (vocabulary, tokens):
        step.add_argument("text", type=Path, help="sentences, one a line")
    for step in (vocabulary, tokens, training):
        step.add_argument("out", type=Path, help="what to write; it must not be there yet")
    vocabulary.add_argument("--size", type=int, default=30_522, help="entries")
    for step in (tokens, training):
        step.add_argument("--vocabulary", type=Path, required=True, help="folder of the tokenizer")
        step.add_argument("--positions", type=int, default=128, help="longest sentence, and width of a row, in tokens")
        words = "lines that are never trained on (2,000, or a tenth of a short text; of an .npz file, its own)"
        step.add_argument("--held-out", type=int, help=words)
    training.add_argument("--minutes", type=float, default=4.0, help="time to train for, compilation not counted")
    training.add_argument("--layers", type=int, default=6)
    training.add_argument("--width", type=int, default=512)
    training.add_argument("--heads", type=int, default=8)
    training.add_argument("--dropout", type=float, default=DROPOUT, help=f"in training; the config says {DROPOUT}")
    training.add_argument("--batch", type=int, help="rows a step (512, or all where there are fewer)")
    training.add_argument("--lr", type=float, default=5e-4, help="peak learning rate")
    training.add_argument("--give-up", type=float, default=0.4, help="share of the time to beat token frequencies in")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    training.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    training.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of the file")
    return parser


def main(argv: list[str] | None = None) -> None:
    options = arguments().parse_args(argv)
    refuse_existing(options.out)
    if options.step == "vocabulary":
        tokenizer = sentences.train_vocabulary(read_lines(options.text), options.size)
        with new_folder(options.out) as folder:
            tokenizer.save_pretrained(folder)
        print(f"{len(tokenizer):,} entries in {options.out}")
        return
    if not options.vocabulary.is_dir():  # transformers would look for it on the Hub
        raise FileNotFoundError(f"there is no folder {options.vocabulary}: make it with `vocabulary` first")
    tokenizer = BertTokenizer.from_pretrained(options.vocabulary)
    packed = options.text.suffix == ".npz"
    if options.held_out is None and not packed:
        options.held_out = sentences.usual_held_out(options.text)
    settings = {name: getattr(options, name) for name in ("positions", "held_out")}
    settings["vocabulary"] = sentences.fingerprint(tokenizer)
    if packed:
        rows, written = sentences.read_rows(options.text, settings)
        options.held_out = written["held_out"]
    else:
        rows = sentences.make_rows(options.text, tokenizer, options.positions, options.held_out)
    if options.step == "tokens":
        sentences.write_rows(options.out, rows, settings)
        filled = int((rows[0] != tokenizer.pad_token_id).sum())
        size = options.out.stat().st_size / 2**20
        print(f"{filled:,} tokens in {len(rows[0]):,} rows, full to {filled / rows[0].size:.1%}; {size:.1f} MiB")
        return
    model, record = train(options, tokenizer, rows)
    about = {
        "command": shlex.join(["python", "experiments/warm_start.py", *(sys.argv[1:] if argv is None else argv)]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in PACKAGES},
        "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor() or "cpu",
        "settings": {name: value for name, value in vars(options).items() if not isinstance(value, Path)},
    }
    save(options.out, model, tokenizer, about | record, options.dtype)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
