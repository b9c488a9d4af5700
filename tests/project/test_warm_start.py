"""The warm start: masks by BERT's rules, sentences apart in their rows, transformers' own loss, a folder that loads."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    DataCollatorForLanguageModeling,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import sentences
import warm_start

from fmicl.models.text import build_sentence_encoder
from fmicl.runs.sentence_encoder import load_sentence_encoder
from fmicl.utils.validation import TokenPooling

PAD, UNK, CLS, SEP, MASK = range(5)


def lines() -> list[str]:
    """1,000 different sentences of 3 to 9 words, and some copies."""
    random = np.random.default_rng(0)
    words = ["river", "mountain", "village", "singer", "album", "castle", "station", "railway", "county", "film"]
    made = [" ".join([*random.choice(words, random.integers(2, 9)), f"No.{i}"]) for i in range(1000)]
    return made + made[:300]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(lines()) + "\n\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def vocabulary(text: Path) -> Path:
    folder = text.with_name("vocabulary")
    warm_start.main(["vocabulary", str(text), str(folder), "--size", "200"])
    return folder


@pytest.fixture(scope="module")
def tokenizer(vocabulary: Path) -> BertTokenizer:
    loaded: BertTokenizer = BertTokenizer.from_pretrained(vocabulary)
    return loaded


SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--batch", "8", "--positions", "32", "--held-out", "50"]


def train_steps(steps: int, *arguments: str) -> None:
    """`train` for a minute by a clock that is one of so many steps on whenever it is looked at, on any machine."""
    ticks = itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "time", SimpleNamespace(perf_counter=lambda: 60 * next(ticks) / steps))
        warm_start.main(["train", *arguments, "--minutes", "1", *SMALL])


@pytest.fixture(scope="module")
def trained(text: Path, vocabulary: Path) -> Path:
    folder = text.with_name("model")
    settings = ["--vocabulary", str(vocabulary), "--seed", "7", "--lr", "0.01", "--dtype", "bfloat16"]
    train_steps(800, str(text), str(folder), *settings)
    return folder


def special_of(size: int) -> Tensor:
    return torch.arange(size) < 5


def tiny_model(vocabulary_size: int, width: int = 32) -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary_size, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=width, initializer_range=0.5,
    )  # fmt: skip
    model: BertForMaskedLM = BertForMaskedLM(config).eval()  # type: ignore[no-untyped-call]
    return model


def sentences_in(rows: np.ndarray[Any, Any]) -> list[tuple[int, ...]]:
    """Of packed rows, split where [CLS] is, without padding."""
    found: list[tuple[int, ...]] = []
    for row in rows:
        starts = [*np.flatnonzero(row == CLS), len(row)]
        found += [tuple(int(t) for t in row[a:b] if t != PAD) for a, b in itertools.pairwise(starts)]
    return found


# --- masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_15_percent_of_which_80_10_10() -> None:
    size = 1000
    rows = torch.randint(size, (4000, 100), generator=torch.Generator().manual_seed(1))
    seen, chosen = sentences.mask_tokens(rows, special_of(size), MASK, torch.Generator().manual_seed(2))

    def near(count: Tensor, out_of: Tensor, share: float) -> bool:
        n = int(out_of)
        return abs(int(count) - share * n) < 4 * math.sqrt(n * share * (1 - share))

    ordinary = rows >= 5
    assert not (chosen & ~ordinary).any()
    assert near(chosen.sum(), ordinary.sum(), 0.15)
    assert torch.equal(seen[~chosen], rows[~chosen])
    told, original = seen[chosen], rows[chosen]
    assert near((told == MASK).sum(), chosen.sum(), 0.8 + 0.1 / size)
    assert near((told == original).sum(), chosen.sum(), 0.1 + 0.1 / size)
    others = told[(told != MASK) & (told != original)]
    assert near(torch.tensor(len(others)), chosen.sum(), 0.1 * (1 - 2 / size))
    counts = torch.bincount(others, minlength=size)  # of all entries alike, special ones too, as in transformers
    assert counts.max() < 4 * counts.double().mean()
    assert (counts > 0).sum() > 0.99 * size


def test_which_tokens_are_special_is_as_in_transformers(tokenizer: BertTokenizer) -> None:
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.999999)
    ids = [CLS, UNK, MASK, 5, 6, 7, SEP, PAD, PAD]
    theirs = collator([{"input_ids": ids}])["labels"][0] != -100
    special = torch.zeros(len(tokenizer), dtype=torch.bool)
    special[tokenizer.all_special_ids] = True
    ours = torch.zeros(len(ids), dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ours |= sentences.mask_tokens(torch.tensor(ids), special, MASK, generator)[1]
    assert torch.equal(ours, theirs)


def test_slots_hold_every_chosen_token() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 100, (512, 32), generator=generator)
    rows[torch.arange(32) >= torch.randint(8, 33, (512, 1), generator=generator)] = PAD
    special = special_of(100)
    count = sentences.slots((~special[rows]).sum(1).double(), 64, 32)
    assert count < 0.3 * 64 * 32
    for _ in range(100):
        batch = rows[torch.randint(512, (64,), generator=generator)]
        chosen = sentences.mask_tokens(batch, special, MASK, generator)[1]
        positions, labels = sentences.select(batch, chosen, count)
        assert len(positions) == len(labels) == count
        assert torch.equal(positions[labels >= 0], chosen.flatten().nonzero().flatten())
        assert torch.equal(labels[labels >= 0], batch[chosen])


# --- loss and rows ---------------------------------------------------------------------------------------------------


def test_loss_at_chosen_tokens_is_that_of_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(5, 60, (6, 20), generator=generator)
    rows[:, 0] = CLS
    rows[torch.arange(20) >= torch.tensor([[20], [15], [9], [20], [4], [12]])] = PAD
    seen, chosen = sentences.mask_tokens(rows, special_of(60), MASK, generator)
    batch = (seen, *sentences.sentence_layout(rows, CLS, PAD), *sentences.select(rows, chosen, 64))
    ours, theirs = tiny_model(60), tiny_model(60)
    labels = torch.where(chosen, rows, -100)
    expected = theirs(input_ids=seen, attention_mask=(rows != PAD).long(), labels=labels).loss
    loss = warm_start.masked_loss(ours, batch)
    torch.testing.assert_close(loss, expected)
    expected.backward()
    loss.backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_a_sentence_in_a_packed_row_is_alone() -> None:
    random = np.random.default_rng(0)
    whole = [np.array([CLS, *random.integers(5, 60, n), SEP], np.uint16) for n in (3, 9, 1, 12, 5, 6, 2, 14, 7)]
    packed = sentences.pack(whole, 32, PAD)
    assert sorted(sentences_in(packed)) == sorted(tuple(int(t) for t in sentence) for sentence in whole)
    assert len(packed) == 3  # 77 tokens in rows of 32
    model, rows = tiny_model(60), torch.from_numpy(packed.astype(np.int64))
    look, positions = sentences.sentence_layout(rows, CLS, PAD)
    with torch.no_grad():
        together = warm_start.predict(model, rows, look, positions, torch.arange(rows.numel())).view(*rows.shape, -1)
        for row, logits in zip(rows, together, strict=True):
            starts = [*torch.nonzero(row == CLS).flatten().tolist(), int((row != PAD).sum())]
            for a, b in itertools.pairwise(starts):
                alone = model(input_ids=row[None, a:b]).logits[0]
                torch.testing.assert_close(logits[a:b], alone, atol=1e-4, rtol=1e-4)


def test_rows_are_all_lines_and_none_that_is_held_out(text: Path, tokenizer: BertTokenizer) -> None:
    train, held_out = (sentences_in(rows) for rows in sentences.make_rows(text, tokenizer, 64, 100))
    assert len(held_out) == 100
    assert not set(train) & set(held_out)
    assert set(train) | set(held_out) == {tuple(ids) for ids in tokenizer(lines())["input_ids"]}
    assert tokenizer.backend_tokenizer.truncation is None  # tokenising left it as it was


def test_special_tokens_in_a_text_are_text(tokenizer: BertTokenizer) -> None:
    (ids,) = sentences.tokenise(["river [CLS] film [SEP] castle [PAD]"], tokenizer, 64)
    assert [token for token in ids.tolist() if token in (PAD, CLS, SEP)] == [CLS, SEP]
    (cut,) = sentences.tokenise(["river film castle " * 20], tokenizer, 16)
    assert len(cut) == 16
    assert cut[-1] == SEP


def test_training_never_sees_a_line_that_is_held_out(
    text: Path, vocabulary: Path, tokenizer: BertTokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: set[tuple[int, ...]] = set()
    make_batch = sentences.make_batch

    def spy(rows: Tensor, special: Tensor, tokenizer: BertTokenizer, count: int, generator: torch.Generator) -> Any:
        if generator.initial_seed() == 7:  # the run's own; the held-out sample is masked by another
            seen.update(sentences_in(rows.cpu().numpy()))
        return make_batch(rows, special, tokenizer, count, generator)

    monkeypatch.setattr(warm_start, "make_batch", spy)
    arguments = [str(text), str(tmp_path / "m"), "--vocabulary", str(vocabulary), "--seed", "7", "--give-up", "1"]
    train_steps(60, *arguments)
    _, held_out = sentences.make_rows(text, tokenizer, 32, 50)
    assert len(seen) > 200
    assert not seen & set(sentences_in(held_out))


# --- training --------------------------------------------------------------------------------------------------------


def test_schedule_rises_to_one_and_ends_at_zero() -> None:
    shares = [warm_start.schedule(i / 1000) for i in range(1001)]
    peak = shares.index(max(shares))
    assert peak == round(1000 * warm_start.WARM_UP)
    assert shares[peak] == pytest.approx(1)
    assert shares[0] == shares[-1] == warm_start.schedule(1.01) == 0
    assert shares[:peak] == sorted(shares[:peak])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)


def test_a_model_learns_more_than_frequencies(trained: Path) -> None:
    record = json.loads((trained / "warm_start.json").read_text())
    assert record["held_out"]["loss"] < record["unigram_baseline"]["loss"]
    assert record["held_out"]["accuracy"] > record["unigram_baseline"]["accuracy"]
    assert record["held_out"]["masked_tokens"] > 20
    assert record["loss_curve"][-1]["loss"] < record["loss_curve"][0]["loss"]
    assert record["steps"] == 799  # the first look is at 1 of 800
    assert record["tokens_seen"] < record["steps"] * 8 * 32
    assert record["tokens_per_second"] == pytest.approx(record["tokens_seen"] / record["seconds"])
    assert record["seconds"] == pytest.approx(60, rel=0.02)
    assert record["settings"]["seed"] == 7
    assert "--minutes 1" in record["command"]


def test_a_run_that_learns_nothing_ends_early(text: Path, vocabulary: Path, tmp_path: Path) -> None:
    arguments = [str(text), str(tmp_path / "m"), "--vocabulary", str(vocabulary), "--lr", "1e-9"]
    with pytest.raises(ValueError, match="no better than token frequencies after 50 steps: take a smaller --lr"):
        train_steps(100, *arguments)
    assert not list(tmp_path.iterdir())


def test_unigram_baseline_by_hand() -> None:
    train = torch.tensor([[CLS, 6, 6, 7, SEP, PAD]], dtype=torch.int32)
    labels, unused = torch.tensor([6, 7, 8, 6]), torch.empty(0)
    scores = warm_start.unigram_scores(train, special_of(9), [(unused, unused, unused, unused, labels)])
    assert scores["token"] == 6
    assert scores["accuracy"] == 0.5
    assert scores["loss"] == pytest.approx(-(2 * math.log(3 / 12) + math.log(2 / 12) + math.log(1 / 12)) / 4)


@pytest.mark.parametrize(("extra", "dropout"), [([], 0.1), (["--dropout", "0"], 0.0)])
def test_it_trains_with_berts_dropout(
    text: Path, vocabulary: Path, tmp_path: Path, extra: list[str], dropout: float
) -> None:
    """In hidden states and in attention; without it only where that is asked for, and the folder says 0.1 then too."""
    met: list[set[float]] = []
    loss = warm_start.masked_loss

    def watched(model: BertForMaskedLM, batch: Any) -> Tensor:
        layers = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}
        met.append(layers if model.training else set())
        assert model.config.hidden_dropout_prob == model.config.attention_probs_dropout_prob == dropout
        return loss(model, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warm_start, "masked_loss", watched)
        train_steps(2, str(text), str(tmp_path / "m"), "--vocabulary", str(vocabulary), *extra)
    assert met == [{dropout}] * 2  # the pass that compiles, and a step
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.1
    told = json.loads((tmp_path / "m" / "warm_start.json").read_text())
    assert told["settings"]["dropout"] == dropout


def test_the_folder_loads_and_makes_views_by_dropout(trained: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(trained), AutoModel.from_pretrained(trained)
    assert tokenizer.model_max_length == 32
    assert tokenizer.convert_ids_to_tokens(tokenizer("River")["input_ids"]) == ["[CLS]", "river", "[SEP]"]
    assert model.config.hidden_dropout_prob == model.config.attention_probs_dropout_prob == 0.1
    assert model.dtype == torch.bfloat16
    inputs = tokenizer(["river castle", "film"], padding=True, return_tensors="pt")
    masked = BertForMaskedLM.from_pretrained(trained).eval()  # type: ignore[no-untyped-call]
    model.eval()
    torch.testing.assert_close(
        model(**inputs).last_hidden_state, masked(**inputs, output_hidden_states=True).hidden_states[-1]
    )
    views = [model.train()(**inputs).last_hidden_state[:, 0] for _ in range(2)]
    assert not torch.equal(*views)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_what_is_scored_is_what_contrastive_runs_start_from(trained: Path, pooling: TokenPooling) -> None:
    """Weights in float32, the same tokens, and the same length."""
    encoder, tokenizer = build_sentence_encoder(str(trained), pooling)
    lines = ["river castle", "film", "a singer of the village " * 20]
    ids = tokenizer.batch(lines, tokenizer.limit)
    assert ids.shape == (3, 32)
    vectors = load_sentence_encoder(trained, "cpu", pooling)(lines)
    torch.testing.assert_close(vectors, encoder.eval()(ids).detach(), atol=1e-5, rtol=1e-4)


def test_tokens_made_ahead_are_those_of_the_text(
    text: Path,
    vocabulary: Path,
    tokenizer: BertTokenizer,
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokens.npz"
    settings = ["--vocabulary", str(vocabulary), "--positions", "32", "--held-out", "50"]
    warm_start.main(["tokens", str(text), str(path), *settings])
    wanted = {"positions": 32, "held_out": 50, "vocabulary": sentences.fingerprint(tokenizer)}
    rows, _ = sentences.read_rows(path, {**wanted, "held_out": None})
    assert sentences.read_rows(path, wanted)[1] == wanted
    for read, made in zip(rows, sentences.make_rows(text, tokenizer, 32, 50), strict=True):
        np.testing.assert_array_equal(read, made)
        assert read.dtype == np.uint16
    with pytest.raises(ValueError, match="made for held_out 50, but 60"):
        warm_start.main(["train", str(path), str(tmp_path / "m"), *settings[:-1], "60"])
    (tmp_path / "other.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match="not a file that `tokens` wrote"):
        warm_start.main(["train", str(tmp_path / "other.npz"), str(tmp_path / "m"), *settings])
    with pytest.raises(FileExistsError, match="not overwritten"):
        warm_start.main(["tokens", str(text), str(path), *settings])


def test_a_short_text_needs_no_numbers(text: Path, vocabulary: Path, tmp_path: Path) -> None:
    """A tenth of it is held out, `train` holds out what the tokens do, and a batch has no more rows than there are."""
    short, tokens = tmp_path / "short.txt", tmp_path / "tokens.npz"
    short.write_text("\n".join(text.read_text().splitlines()[:60]))
    options = ["--vocabulary", str(vocabulary), "--positions", "32"]
    warm_start.main(["tokens", str(short), str(tokens), *options])
    assert sentences.read_rows(tokens, {"held_out": 6})[1]["held_out"] == 6
    small = ["--layers", "1", "--width", "16", "--heads", "2", "--minutes", "0.01", "--give-up", "1", "--device", "cpu"]
    warm_start.main(["train", str(tokens), str(tmp_path / "model"), *options, *small])
    settings = json.loads((tmp_path / "model" / "warm_start.json").read_text())["settings"]
    assert settings["held_out"] == 6
    assert 0 < settings["batch"] < 60


# --- what it refuses -------------------------------------------------------------------------------------------------


def test_nothing_is_overwritten(text: Path, vocabulary: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    for arguments in (["vocabulary"], ["train", "--vocabulary", str(vocabulary)]):
        with pytest.raises(FileExistsError, match="exists and is not overwritten"):
            warm_start.main([arguments[0], str(text), str(tmp_path), *arguments[1:]])
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_run_that_fails_leaves_nothing(text: Path, vocabulary: Path, tmp_path: Path) -> None:
    train = ["train", str(text), str(tmp_path / "model"), "--vocabulary"]
    with pytest.raises(ValueError, match=r"more than the 4\d\d there are"):
        warm_start.main([*train, str(vocabulary), *SMALL, "--batch", "5000"])
    with pytest.raises(ValueError, match=r"1300 lines to hold out \(--held-out\) of 1300"):
        warm_start.main([*train, str(vocabulary), "--held-out", "1300"])
    with pytest.raises(FileNotFoundError, match="no folder"):
        warm_start.main([*train, str(tmp_path / "nowhere")])
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    with pytest.raises(ValueError, match="no sentences"):
        warm_start.main(["vocabulary", str(empty), str(tmp_path / "v")])
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
