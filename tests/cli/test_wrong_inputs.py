"""Wrong inputs on the command line, as a table: what is typed, the exit code, the key facts of the message.

Every case also checks that the message is short and no traceback, and that nothing is lost: the files that were there
are unchanged, and no half-written folder stays.

The upper-case words of a command are files and folders that the case finds in its working folder:

    PHOTOS   12 small PNG files in three class folders      TEXT   a file of sentences
    RUN      a run that was trained on PHOTOS                BERT   a tiny transformers folder
    WORDS    a run that was trained on TEXT                  STS    the STS tasks
    SWEEP    a finished sweep of one run
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import shlex
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import image_sets
import small_text_settings
from fmicl.cli import main as cli
from fmicl.config import recipe
from fmicl.runs.folder import Run
from fmicl.training.module import TrainingModule
from fmicl.training.pipeline import train
from sts_files import write_sts
from tiny_bert import SENTENCES, tiny_bert

SMALL = "--encoder small_conv --size 16 --hidden 8 --dim 8 --batch-size 4 --epochs 1 --device cpu --workers 0"
IMAGES = f"train images {SMALL} --data-dir"
TEXT = "train wikipedia --model BERT --cache-dir cache --length 16 --batch-size 8 --device cpu --data"


@dataclass(frozen=True)
class Case:
    """A command, the facts that its message must have, and what is done to its files before."""

    command: str
    facts: str
    """Separated by "|"."""
    damage: Callable[[], object] | None = None
    code: int = 2


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files and folders that commands name, made once; a case works on copies."""
    root = tmp_path_factory.mktemp("stock")
    photos = image_sets.make("images", root)
    assert photos is not None
    photos.rename(root / "PHOTOS")
    common: dict[str, Any] = {"device": "cpu", "hidden": 8, "epochs": 1}
    options = {"encoder": "small_conv", "size": 16, "dim": 8, "batch_size": 4, "workers": 0, "k": 3}
    assert train(recipe("images", data_dir=root / "PHOTOS", **common, **options), out=root / "RUN")
    (root / "text.txt").write_text("\n".join(SENTENCES) + "\n")
    tiny_bert(root / "bert")
    shutil.copytree(root / "bert", root / "BERT")
    shutil.copy(root / "text.txt", root / "TEXT")
    assert train(small_text_settings.small(root), out=root / "WORDS")
    write_sts(root / "STS")
    (root / "SWEEP").mkdir()
    (root / "SWEEP" / "sweep.json").write_text("{}")
    return root


def edit_json(path: str, **changes: object) -> None:
    """Change values of a JSON file; None removes one."""
    value = {**json.loads(Path(path).read_text()), **changes}
    Path(path).write_text(json.dumps({key: x for key, x in value.items() if x is not None}))


def edit_settings(path: str, **changes: object) -> None:
    """Change options in the settings.json of a run."""
    edit_json(path, settings={**json.loads(Path(path).read_text())["settings"], **changes})


def cut(path: str, share: float = 0.5) -> None:
    """Truncate a file."""
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: int(len(data) * share)])


def write(path: str, content: str | bytes = "") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(*paths: str) -> None:
    for path in paths:
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()


def empty(*folders: str) -> None:
    for folder in folders:
        Path(folder).mkdir(parents=True)


def unfinish(run: str) -> None:
    """Make a run look as if its training had not ended."""
    remove(*(f"{run}/{name}" for name in ("results.json", "report.html") if Path(run, name).exists()))


def other_encoder() -> None:
    save_file({f"layer{i}.weight": torch.zeros(3, 2) for i in range(300)}, "RUN/encoder.safetensors")


def other_width() -> None:
    weights = {name: torch.cat([x, x]) if x.ndim else x for name, x in load_file("RUN/encoder.safetensors").items()}
    save_file(weights, "RUN/encoder.safetensors")


def damage_checkpoint(damage: Callable[[str], None]) -> None:
    unfinish("RUN")
    damage("RUN/checkpoints/last.ckpt")


def change_text() -> None:
    unfinish("WORDS")
    write("TEXT", "a man\n" * 20)


def not_a_state() -> None:
    unfinish("RUN")
    torch.save({"weights": torch.zeros(3)}, "RUN/checkpoints/last.ckpt")


def state_of_another_method() -> None:
    unfinish("RUN")
    state = torch.load("RUN/checkpoints/last.ckpt", weights_only=True)
    torch.save({**state, "method": {f"layer{i}": torch.zeros(2) for i in range(300)}}, "RUN/checkpoints/last.ckpt")


def change_photos() -> None:
    unfinish("RUN")
    image_sets.write_image(Path("PHOTOS/a/new.png"))


def zip_photos() -> None:
    with zipfile.ZipFile("photos.zip", "w") as archive:
        archive.writestr("0.png", "no matter what")


def damage_all_photos(damage: Callable[[Path], object]) -> None:
    for path in Path("PHOTOS").rglob("*.png"):
        damage(path)


def truncated_jpegs() -> None:
    empty("jpegs")
    for k in range(3):
        Image.new("RGB", (40, 40), (k, 0, 0)).save(f"jpegs/{k}.jpg")
        cut(f"jpegs/{k}.jpg")


def one_image_each() -> None:
    for k in range(3):
        image_sets.write_image(Path(f"few/{k}/0.png"), seed=k)


def link_loop() -> None:
    empty("loop/inner")
    Path("loop/inner/again").symlink_to(Path("loop").absolute())


def train_and_test(test: str) -> None:
    image_sets.make_classes(Path("split/train"), {"a": 3, "b": 3})
    image_sets.make_classes(Path("split/test"), {test: 3})


def loose_test_images() -> None:
    image_sets.make_classes(Path("split/train"), {"a": 3, "b": 3})
    image_sets.write_image(Path("split/val/1.png"))


def official(name: str, damage: Callable[[Path], object]) -> Callable[[], None]:
    """A small copy of a dataset in the official layout, with damage."""

    def make() -> None:
        folder = image_sets.make(name, Path())
        assert folder is not None
        damage(folder)

    return make


OPTIONS = [
    Case("trian digits", "'trian'|'train'"),
    Case("", "usage", code=0),
    Case("--nonsense", "'--nonsense'"),
    Case("train", "needs a recipe"),
    Case("sweep", "needs a recipe"),
    Case("train imgs --data-dir x", "recipe 'imgs'|'images'"),
    Case("train wiki", "'wikipedia'"),
    Case("train photos", "recipe 'photos'|digits, cifar10"),
    Case("train --epochs 3", "'--epochs'"),
    Case("sweep digitz --seed 0 1", "recipe 'digitz'|'digits'"),
    Case("train digits --epochs 0", "epochs|0"),
    Case("train digits --epochs -1", "epochs|-1"),
    Case("train digits --epochs x", "--epochs|x"),
    Case("train digits --epochs 1.5", "--epochs|1.5"),
    Case("train digits --epochs", "--epochs"),
    Case("train digits --epoch 3", "--epochs"),
    Case("train digits extra", "extra"),
    Case("train digits --batch-size 0", "batch_size|0"),
    Case("train digits --batch-size 1", "batch|1"),
    Case("train digits --batch-size 5000", "1347 samples|5000|--batch-size"),
    Case("train digits --accumulate 0", "accumulate|0"),
    Case("train digits --learning-rate inf", "learning_rate|finite|inf"),
    Case("train digits --learning-rate nan", "learning_rate|finite|nan"),
    Case("train digits --learning-rate 0", "learning_rate|above 0|0"),
    Case("train digits --learning-rate -0.1", "learning_rate|-0.1"),
    Case("train digits --weight-decay -1", "weight_decay|-1"),
    Case("train digits --weight-decay inf", "weight_decay|finite|inf"),
    Case("train digits --warmup-epochs -1", "warmup_epochs|-1"),
    Case("train digits --clip -1", "clip|-1"),
    Case("train digits --optimizer adam", "--optimizer|adam"),
    Case("train digits --schedule step", "--schedule|step"),
    Case("train digits --seed -1", "seed|-1"),
    Case(f"train digits --seed {2**63}", f"seed|{2**63}"),
    Case("train digits --device tpu", "--device|tpu"),
    Case("train digits --devices 0", "devices|0"),
    Case("train digits --precision fp16", "--precision|fp16"),
    Case("train digits --checkpoint-minutes 0", "checkpoint_minutes|0"),
    Case("train digits --checkpoint-steps -1", "checkpoint_steps|-1"),
    Case("train digits --flip 2", "flip|2"),
    Case("train digits --grey -0.1", "grey|-0.1"),
    Case("train digits --hue 0.6", "hue|0.6"),
    Case("train digits --brightness -1", "brightness|-1"),
    Case("train digits --size 1", "size|1"),
    Case("train digits --crop-scale 0 1", "crop_scale|0"),
    Case("train digits --crop-scale 0.9 0.2", "crop_scale|0.9"),
    Case("train digits --crop-scale 0.2", "--crop-scale"),
    Case("train digits --crop-scale 0.2 1.5", "crop_scale|1.5"),
    Case("train digits --blur-sigma 0 1", "blur_sigma|0"),
    Case("train digits --mean 0.5 0.5 --std 0.5 0.5", "mean|2"),
    Case("train digits --std 0", "std|0"),
    Case("train digits --second-blur 1.5", "second_blur|1.5"),
    Case("train digits --multiplicity 1", "multiplicity|1"),
    Case("train digits --multiplicity 4 --method moco", "multiplicity|4|moco"),
    Case("train digits --multiplicity 4 --second-blur 0.5", "multiplicity|4|second_blur"),
    Case("train digits --validation 1", "validation|1"),
    Case("train digits --validation nan", "validation|nan"),
    Case("train digits --workers -1", "workers|-1"),
    Case("train digits --memory-gib -1", "memory_gib|-1"),
    Case("train digits --k 0", "k |0"),
    Case("train digits --monitor-every -1", "monitor_every|-1"),
    Case("train digits --probe-views -1", "probe_views|-1"),
    Case("train digits --hidden 0", "hidden|0"),
    Case("train digits --dim 0", "dim|0"),
    Case("train digits --encoder resnet_18", "resnet_18|resnet18"),
    Case("train digits --encoder resnet18.a1_in1k", "resnet18.a1_in1k|--encoder resnet18"),
    Case("train digits --depth 0", "depth|0"),
    Case("train digits --encoder resnet18 --depth 3", "depth|resnet18"),
    Case("train digits --stem tiny", "--stem|tiny"),
    Case("train digits --method byoll", "--method|byoll"),
    Case("train digits --method moco --queue 0", "queue|0"),
    Case("train digits --method moco --encoder-momentum 1.5", "encoder_momentum|1.5"),
    Case("train digits --method moco --encoder-momentum 0.9 --encoder-momentum-end 0.5", "encoder_momentum_end|0.5"),
    Case("train digits --objective nce", "--objective|nce"),
    Case("train digits --objective infonce --temperature 0", "temperature|0"),
    Case("train digits --objective spectral --mu normalised", "mu|spectral"),
    Case("train digits --objective align_uniform --uniformity-gamma -1", "uniformity_gamma|-1"),
    Case("train digits --divergence kll", "--divergence|kll"),
    Case("train digits --divergence tsallis --order 1", "order|1"),
    Case("train digits --divergence tsallis --order inf", "order|inf"),
    Case("train digits --alpha 0", "alpha|0"),
    Case("train digits --gamma inf", "gamma|inf"),
    Case("train digits --mu 0", "mu|0"),
    Case("train digits --mu some", "--mu|some"),
    Case("train digits --similarity cosine --mu 2", "cosine|mu"),
    Case("train digits --similarity dot", "--similarity|dot"),
    Case("train digits --shift best", "--shift|best"),
    Case("train digits --negatives some", "--negatives|some"),
    Case("train digits --rotation-weight -1", "rotation_weight|-1"),
    Case("train digits --rotation-weight 1 --rotation-size 9", "rotation_size|9"),
    Case("train digits --rotation-weight 1 --divergence reverse_kl", "reverse_kl"),
    Case("train digits --dataset mnist", "--dataset|mnist"),
    Case("train digits --out ''", "--out|empty"),
    Case("train digits --out=", "--out|empty"),
    Case("train digits --out PHOTOS", "PHOTOS exists|--out"),
    Case("train digits --out FILE", "FILE|file|--out", lambda: write("FILE")),
    Case("train digits --out FILE/run", "FILE|file|--out", lambda: write("FILE")),
    Case("train digits --out PHOTOS --resume", "PHOTOS|settings.json"),
    Case("train digits --out RUN --resume", "RUN|images"),
    Case("train digits --out FILE --resume", "FILE|file", lambda: write("FILE")),
    Case("sweep digits --launcher ssh", "--launcher|ssh"),
    Case("sweep digits --case", "case"),
    Case("sweep digits --seed -1 0", "seed|-1"),
    Case("sweep digits --out RUN", "RUN|--out"),
    Case("sweep digits --out ''", "--out|empty"),
    Case("sweep digits --out FILE/sweep", "FILE|file", lambda: write("FILE")),
    Case("sweep images", "--data-dir"),
    Case("evaluate", "RUN"),
    Case("embed", "RUN"),
    Case("report", "RUN"),
    Case("report RUN extra", "extra"),
]

DATA = [
    Case("train cifar10", "--data-dir"),
    Case("train images", "--data-dir"),
    Case("train stl10 --data-dir nowhere", "nowhere"),
    Case("train cifar10 --data-dir PHOTOS", "PHOTOS|cifar-10-batches-bin"),
    Case("train stl10 --data-dir PHOTOS", "PHOTOS|stl10"),
    Case("train tinyimagenet --data-dir PHOTOS", "PHOTOS|tiny-imagenet-200"),
    Case("train imagenet --data-dir PHOTOS", "PHOTOS|train"),
    Case("train imagenet --data-dir nowhere --download", "download"),
    Case(
        "train cifar10 --data-dir cifar10",
        "data_batch_1.bin|truncated|--no-checksum",
        official("cifar10", Path.exists),
    ),
    Case(
        "train cifar10 --data-dir cifar10 --no-checksum",
        "data_batch_2.bin",
        official("cifar10", lambda folder: cut(f"{folder}/cifar-10-batches-bin/data_batch_2.bin", 0.9)),
    ),
    Case(
        "train cifar10 --data-dir cifar10 --no-checksum",
        "test_batch.bin",
        official("cifar10", lambda folder: remove(f"{folder}/cifar-10-batches-bin/test_batch.bin")),
    ),
    Case(
        "train stl10 --data-dir stl10 --no-checksum",
        "train_y.bin",
        official("stl10", lambda folder: cut(f"{folder}/stl10_binary/train_y.bin")),
    ),
    Case(
        "train tinyimagenet --data-dir tinyimagenet",
        "val_annotations.txt",
        official("tinyimagenet", lambda folder: write(f"{folder}/tiny-imagenet-200/val/val_annotations.txt", "x\n")),
    ),
    Case("train imagenet --data-dir imagenet", "val", official("imagenet", lambda folder: remove(f"{folder}/val"))),
    Case(f"{IMAGES} nowhere", "nowhere"),
    Case(f"{IMAGES} ''", "--data-dir|empty"),
    Case(f"{IMAGES} empty", "no images in empty|.png", lambda: empty("empty")),
    Case(f"{IMAGES} docs", "no images in docs", lambda: write("docs/a.pdf", "x")),
    Case(f"{IMAGES} TEXT", "TEXT|folder"),
    Case(f"{IMAGES} photos.zip", "photos.zip|folder", zip_photos),
    Case(f"{IMAGES} one", "1 samples|4", lambda: image_sets.write_image(Path("one/1.png"))),
    Case(f"{IMAGES} PHOTOS/a/0.png", "0.png|folder"),
    Case(f"{IMAGES} PHOTOS --batch-size 100", "100|--batch-size"),
    Case(f"{IMAGES} few", "3 samples|two", one_image_each),
    Case(f"{IMAGES} PHOTOS", "PHOTOS|can be read|and 6 more", lambda: damage_all_photos(image_sets.damage_header)),
    Case(
        f"{IMAGES} PHOTOS",
        "PHOTOS|can be read|and 6 more",
        lambda: damage_all_photos(lambda path: path.write_bytes(b"")),
    ),
    Case(
        f"{IMAGES} PHOTOS", "PHOTOS|can be read|and 6 more", lambda: damage_all_photos(lambda path: cut(str(path), 0.3))
    ),
    Case(f"{IMAGES} jpegs", "jpegs|can be read|0.jpg", truncated_jpegs),
    Case(f"{IMAGES} loop", "no images in loop", link_loop),
    Case(f"{IMAGES} link", "link", lambda: Path("link").symlink_to("nowhere")),
    Case(f"{IMAGES} split", "split/test|c", lambda: train_and_test("c")),
    Case(f"{IMAGES} split", "1.png|class", loose_test_images),
    Case(f"{IMAGES} RUN", "RUN|fmicl run"),
    Case(f"{IMAGES} WORDS", "WORDS|fmicl run"),
    Case(f"{IMAGES} SWEEP", "SWEEP|fmicl run"),
    Case("train wikipedia", "--data"),
    Case(f"{TEXT} nowhere.txt", "nowhere.txt"),
    Case(f"{TEXT} PHOTOS", "PHOTOS|folder"),
    Case(f"{TEXT} ''", "--data|empty"),
    Case(f"{TEXT} empty.txt", "empty.txt|no sentence", lambda: write("empty.txt")),
    Case(f"{TEXT} blank.txt", "blank.txt|no sentence|3", lambda: write("blank.txt", "\n \n\t\n")),
    Case(f"{TEXT} bom.txt", "bom.txt|no sentence", lambda: write("bom.txt", b"\xef\xbb\xbf")),
    Case(f"{TEXT} one.txt", "1 samples|8", lambda: write("one.txt", "a man plays guitar\n")),
    Case(f"{TEXT} crlf.txt", "2 samples|8", lambda: write("crlf.txt", "a man\r\nthe dog\r\n")),
    Case(f"{TEXT} latin.txt", "latin.txt|line 2, byte 4|0xe9|iconv", lambda: write("latin.txt", b"a\ncaf\xe9\n")),
    Case(f"{TEXT} utf16.txt", "utf16.txt|0xff|UTF-16", lambda: write("utf16.txt", "a man\n".encode("utf-16"))),
    Case(f"{TEXT} wide.txt", "wide.txt|0x00|UTF-16", lambda: write("wide.txt", "a man\n".encode("utf-16-le"))),
    Case(f"{TEXT} nul.txt", "nul.txt|1 of 3|line 2, byte 3|0x00", lambda: write("nul.txt", b"a\nb \0\nc\n")),
    Case(f"{TEXT} binary", "binary|0x", lambda: write("binary", bytes(range(256)) * 8)),
    Case(f"{TEXT} x.gz", "x.gz|gzip|decompress", lambda: write("x.gz", gzip.compress(b"a man\n"))),
    Case(f"{TEXT} photos.zip", "photos.zip|zip", zip_photos),
    Case(f"{TEXT} TEXT --length 2", "length|2"),
    Case(f"{TEXT} TEXT --length 17", "length|17|16"),
    Case(f"{TEXT} TEXT --encode-length 17", "encode_length|17|16"),
    Case(f"{TEXT} TEXT --encode-length 0", "encode_length|0"),
    Case(f"{TEXT} TEXT --batch-size 1000", "32 samples|1000"),
    Case(f"{TEXT} TEXT --pooling max", "--pooling|max"),
    Case(f"{TEXT} TEXT --sts-every 0", "sts_every|0"),
    Case(f"{TEXT} TEXT --sts nowhere", "nowhere"),
    Case(f"{TEXT} TEXT --sts PHOTOS", "PHOTOS|STS"),
    Case(f"{TEXT} TEXT --sts STS", "sts-dev.csv", lambda: remove("STS/STS/STSBenchmark/sts-dev.csv")),
    Case(f"{TEXT} TEXT --sts STS", "sts-dev.csv", lambda: write("STS/STS/STSBenchmark/sts-dev.csv", "a\tb\n")),
    Case(f"{TEXT} TEXT --cache-dir TEXT", "TEXT|--cache-dir"),
    Case(f"{TEXT} TEXT --model nowhere/at/all", "nowhere/at/all"),
    Case(f"{TEXT} TEXT --model ./nowhere", "./nowhere"),
    Case(f"{TEXT} TEXT --model hollow", "hollow|config.json", lambda: empty("hollow")),
    Case(f"{TEXT} TEXT --model TEXT", "TEXT|file"),
    Case(f"{TEXT} TEXT --model RUN", "RUN|config.json"),
    Case(f"{TEXT} TEXT", "BERT", lambda: cut("BERT/model.safetensors")),
    Case(f"{TEXT} TEXT", "BERT", lambda: remove("BERT/model.safetensors")),
    Case(f"{TEXT} TEXT", "BERT", lambda: write("BERT/config.json", "{")),
    Case(f"{TEXT} TEXT", "BERT", lambda: write("BERT/config.json", "{}")),
    Case(f"{TEXT} TEXT --encoder resnet18", "--encoder"),
]

RUNS = [
    *(Case(f"{command} nowhere", "nowhere") for command in ("evaluate", "report")),
    *(Case(f"{command} PHOTOS", "PHOTOS|settings.json") for command in ("evaluate", "report")),
    *(Case(f"{command} TEXT", "TEXT|file") for command in ("evaluate", "report")),
    *(Case(f"{command} ''", "empty") for command in ("evaluate", "report")),
    Case("evaluate RUN", "settings.json|damaged", lambda: cut("RUN/settings.json")),
    Case("report RUN", "settings.json", lambda: remove("RUN/settings.json")),
    Case("evaluate RUN", "settings.json", lambda: write("RUN/settings.json")),
    Case("evaluate RUN", "settings.json|list", lambda: write("RUN/settings.json", "[]")),
    Case("evaluate RUN", "settings.json|recipe, settings, task", lambda: write("RUN/settings.json", "{}")),
    Case("evaluate RUN", "task 'video'", lambda: edit_json("RUN/settings.json", task="video")),
    Case("evaluate RUN", "settings.json|list", lambda: edit_json("RUN/settings.json", settings=[1])),
    Case("evaluate RUN", "encoder 'resnet_x'", lambda: edit_json("RUN/encoder.json", encoder="resnet_x")),
    Case("evaluate RUN", "epochs|-3", lambda: edit_settings("RUN/settings.json", epochs=-3)),
    Case("evaluate RUN", "epochs|'many'", lambda: edit_settings("RUN/settings.json", epochs="many")),
    Case("evaluate RUN", "'novel'", lambda: edit_settings("RUN/settings.json", novel=1)),
    Case("evaluate RUN", "'byol9'", lambda: edit_settings("RUN/settings.json", method="byol9")),
    Case("evaluate RUN", "encoder.json|--resume", lambda: remove("RUN/encoder.json")),
    Case("evaluate RUN", "encoder.json|damaged", lambda: cut("RUN/encoder.json")),
    Case("evaluate RUN", "encoder.json|damaged|size", lambda: edit_json("RUN/encoder.json", size=None)),
    Case("evaluate RUN", "encoder.json|damaged|extra", lambda: edit_json("RUN/encoder.json", extra=1)),
    Case("evaluate RUN", "encoder.safetensors|missing", lambda: remove("RUN/encoder.safetensors")),
    Case("evaluate RUN", "encoder.safetensors|damaged", lambda: cut("RUN/encoder.safetensors")),
    Case("evaluate RUN", "encoder.safetensors|damaged", lambda: write("RUN/encoder.safetensors")),
    Case("evaluate RUN", "encoder.safetensors|small_conv|297 more", other_encoder),
    Case("evaluate RUN", "encoder.safetensors|small_conv|has shape", other_width),
    Case("evaluate RUN", "projection.safetensors|damaged", lambda: cut("RUN/projection.safetensors")),
    Case("evaluate RUN", "projection.safetensors|missing", lambda: remove("RUN/projection.safetensors")),
    Case("evaluate RUN", "projection.safetensors|shape", lambda: edit_settings("RUN/settings.json", dim=9)),
    Case("evaluate RUN --data-dir nowhere", "nowhere"),
    Case("evaluate RUN --data-dir RUN", "RUN|fmicl run"),
    Case("evaluate RUN --data-dir empty", "no images in empty", lambda: empty("empty")),
    Case("evaluate RUN --workers -1", "workers|-1"),
    Case("evaluate RUN --probe-views -1", "probe_views|-1"),
    Case("evaluate RUN --device tpu", "--device|tpu"),
    Case("evaluate RUN --sts STS", "a run on images|fmicl.load_encoder"),
    Case("evaluate RUN --json x.json", "--json|--sts"),
    Case("evaluate RUN --pooling cls", "--pooling|--sts"),
    Case("evaluate nowhere --sts STS", "nowhere"),
    Case("evaluate WORDS", "WORDS|--sts"),
    Case("evaluate WORDS --sts nowhere", "nowhere"),
    Case("evaluate WORDS --sts PHOTOS", "PHOTOS|STS"),
    Case("evaluate WORDS --sts STS --workers 3", "--workers|--sts"),
    Case("evaluate WORDS --sts STS --data-dir PHOTOS", "--data-dir|--sts"),
    Case("evaluate WORDS --sts STS --json TEXT", "TEXT exists"),
    Case("evaluate WORDS --sts STS --json nowhere/x.json", "nowhere|x.json"),
    Case("evaluate WORDS --sts STS --pooling cls", "--pooling|modules.json"),
    Case("evaluate WORDS --sts STS", "WORDS", lambda: cut("WORDS/sentence_transformer/model.safetensors")),
    Case("evaluate WORDS --sts STS", "WORDS", lambda: remove("WORDS/sentence_transformer")),
    Case("evaluate WORDS --sts STS", "modules.json", lambda: remove("WORDS/modules.json")),
    Case("evaluate WORDS --sts STS", "WORDS", lambda: write("WORDS/modules.json", "{")),
    Case("evaluate BERT --sts STS", "BERT|--pooling cls"),
    Case("evaluate PHOTOS --sts STS", "PHOTOS|modules.json"),
    Case(
        "evaluate WORDS --sts STS",
        "STS.gs.MSRpar.txt",
        lambda: write("STS/STS/STS12-en-test/STS.gs.MSRpar.txt", "x\n"),
    ),
    Case("evaluate WORDS --sts STS", "SICK", lambda: write("STS/SICK/SICK_test_annotated.txt", b"\xff\xfe\n")),
    Case("embed RUN PHOTOS", "-o"),
    Case("embed RUN PHOTOS -o x.txt", "x.txt|.parquet"),
    Case("embed RUN PHOTOS -o ''", "-o|empty"),
    Case("embed RUN PHOTOS -o nowhere/x.csv", "nowhere|x.csv"),
    Case("embed RUN PHOTOS -o TEXT.csv", "TEXT.csv exists", lambda: write("TEXT.csv", "mine")),
    Case("embed RUN PHOTOS -o x.csv --batch-size 0", "--batch-size|0"),
    Case("embed RUN PHOTOS -o x.csv --workers -1", "--workers|-1"),
    Case("embed RUN PHOTOS -o x.csv --pooling cls", "--pooling|images"),
    Case("embed RUN nowhere -o x.csv", "nowhere"),
    Case("embed RUN empty -o x.csv", "no images in empty", lambda: empty("empty")),
    Case("embed RUN RUN -o x.csv", "RUN|fmicl run"),
    Case("embed RUN PHOTOS/a/0.png -o x.csv", "0.png|folder"),
    Case("embed RUN TEXT -o x.csv", "RUN|images|load_encoder"),
    Case("embed RUN PHOTOS -o x.csv", "none of the 12", lambda: damage_all_photos(image_sets.damage_header)),
    Case("embed RUN PHOTOS -o x.csv", "encoder.safetensors|damaged", lambda: cut("RUN/encoder.safetensors")),
    Case("embed RUN PHOTOS -o x.csv", "encoder.json|--resume", lambda: remove("RUN/encoder.json")),
    Case("embed PHOTOS PHOTOS -o x.csv", "PHOTOS|settings.json"),
    Case("embed nowhere PHOTOS -o x.csv", "nowhere"),
    Case("embed WORDS PHOTOS -o x.csv", "PHOTOS|folder|sentence"),
    Case("embed WORDS nowhere.txt -o x.csv", "nowhere.txt"),
    Case("embed WORDS empty.txt -o x.csv", "empty.txt is empty", lambda: write("empty.txt")),
    Case("embed WORDS latin.txt -o x.csv", "latin.txt|line 1|0xe9", lambda: write("latin.txt", b"caf\xe9\n")),
    Case("embed WORDS nul.txt -o x.csv", "nul.txt|line 1|0x00", lambda: write("nul.txt", b"a\0b\n")),
    Case("embed WORDS TEXT -o x.csv --workers 2", "--workers|text"),
    Case("embed WORDS TEXT -o x.csv --pooling cls", "--pooling|modules.json"),
    Case("embed BERT TEXT -o x.csv", "BERT|--pooling"),
    Case("embed hollow TEXT -o x.csv", "hollow|modules.json", lambda: empty("hollow")),
    Case("train images --resume --out RUN --gamma 3", "RUN|gamma|3.0", lambda: unfinish("RUN")),
    Case("train images --resume --out RUN --data-dir nowhere", "nowhere", lambda: unfinish("RUN")),
    Case("train images --resume --out RUN", "RUN|training set", change_photos),
    Case("train images --resume --out nowhere", "nowhere|no run"),
    Case("train images --resume", "no run"),
    Case("train cifar10 --resume --out RUN", "fmicl train images --resume --out RUN"),
    Case("train images --resume --out RUN", "settings.json|damaged", lambda: cut("RUN/settings.json")),
    Case("train images --resume --out RUN", "last.ckpt|remove it", lambda: damage_checkpoint(cut)),
    Case("train images --resume --out RUN", "last.ckpt|remove it", lambda: damage_checkpoint(write)),
    Case("train images --resume --out RUN", "last.ckpt|batches|remove it", not_a_state),
    Case("train images --resume --out RUN", "checkpoint|297 more", state_of_another_method),
    Case("train wikipedia --resume --out WORDS --data TEXT", "WORDS|sentences", change_text),
]

CASES = [*OPTIONS, *DATA, *RUNS]
NAMES = ("PHOTOS", "TEXT", "RUN", "WORDS", "BERT", "STS", "SWEEP")


def files(folder: Path) -> dict[str, str]:
    """Every file with a digest of its content, and every folder; locks and caches are nobody's."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_file():
            found[name] = ""
        elif path.name != ".lock":
            found[name] = hashlib.blake2b(path.read_bytes()).hexdigest()
    return {name: digest for name, digest in found.items() if not name.startswith("cache")}


def run(command: str) -> int:
    """The exit code of a command; words that can't be parsed raise SystemExit."""
    try:
        return cli.main(shlex.split(command))
    except SystemExit as end:
        return int(end.code or 0)


def take(command: str, stock: Path) -> None:
    """Copy what a command names into the working folder; the data of RUN is the copy there."""
    words = command.replace("/", " ").split()
    for name in NAMES:
        if name in words or (name == "PHOTOS" and "RUN" in words):
            (shutil.copytree if (stock / name).is_dir() else shutil.copy)(stock / name, name)
    if "RUN" in words:
        edit_settings("RUN/settings.json", data_dir="PHOTOS")


def too_late(*_: object, **__: object) -> None:
    raise AssertionError("a wrong input is found before the first step")


@pytest.mark.parametrize("case", [pytest.param(case, id=f"{i:03d} {case.command}") for i, case in enumerate(CASES)])
def test_wrong_input(
    case: Case,
    stock: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    take(case.command, stock)
    monkeypatch.setattr(TrainingModule, "training_step", too_late)
    if case.damage is not None:
        case.damage()
    before = files(tmp_path)
    assert run(case.command) == case.code
    shown = capsys.readouterr()
    error = " ".join((shown.err if case.code else shown.out).replace("│", " ").split())
    assert [fact for fact in case.facts.split("|") if fact not in error] == [], error
    assert "Traceback" not in error
    assert len(error) < 1500, "a message, not a dump"
    assert shown.err.count("\n") <= (1 if error.startswith("fmicl: error:") else 30), shown.err
    assert files(tmp_path) == before


def test_there_are_200_cases_and_more() -> None:
    assert len(CASES) >= 200


@pytest.fixture
def shown(
    stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], tuple[int, str, str]]:
    """Runs a command in a folder of its own, and gives its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)

    def result(command: str) -> tuple[int, str, str]:
        code = run(command)
        captured = capsys.readouterr()
        return code, " ".join(captured.out.split()), captured.err

    take("RUN TEXT BERT", stock)
    return result


Shown = Callable[[str], tuple[int, str, str]]


def test_a_full_disk_is_one_line_and_keeps_the_checkpoint(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = torch.save, []

    def save(state: object, file: Any) -> None:
        written.append(state)
        if len(written) > 1:
            file.write(b"the beginning")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(state, file)

    with monkeypatch.context() as full:
        full.setattr("fmicl.training.checkpoints.torch.save", save)
        code, _, error = shown(f"{IMAGES} PHOTOS --epochs 2 --checkpoint-steps 1 --out new")
    assert code == 2
    assert error.count("\n") == 1
    assert all(fact in error for fact in ("disk is full", "last.ckpt", "--resume", "new"))
    assert [path.name for path in Path("new/checkpoints").iterdir()] == ["last.ckpt"]
    assert torch.load("new/checkpoints/last.ckpt", weights_only=True)["batches"] == 1
    assert shown("train images --resume --out new")[0] == 0
    assert Run(Path("new")).finished


def test_evaluation_says_what_it_replaces_and_that_k_is_lowered(shown: Shown) -> None:
    before = Path("RUN/results.json").read_bytes()
    edit_settings("RUN/settings.json", k=5000)
    shutil.copytree("PHOTOS", "OTHER")
    image_sets.write_image(Path("OTHER/a/new.png"))
    code, output, _ = shown("evaluate RUN --data-dir OTHER --device cpu")
    assert code == 0
    samples = json.loads(Path("RUN/results.json").read_text())["train_samples"]
    assert f"k is {samples}, the number of training images, and not 5000" in output
    assert "results.json is replaced" in output
    assert "kept in results-1.json" in output
    assert Path("RUN/results-1.json").read_bytes() == before


def test_a_line_that_is_no_sentence_is_announced(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    write("long.txt", "\n".join([*SENTENCES, "a man " * 20_000]) + "\n")
    monkeypatch.setattr("fmicl.training.pipeline.fit", too_late)
    lines: list[str] = []
    monkeypatch.setattr("fmicl.training.pipeline.say", lines.append)
    for _ in ("tokenised", "from the cache"):
        lines.clear()
        with pytest.raises(AssertionError, match="first step"):
            shown(f"{TEXT} long.txt")
        assert any("1 line(s) of long.txt" in line and "16 tokens" in line for line in lines), lines
