"""The sentence-transformers loss, with a tiny BERT."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (the extra text)")

from sentence_transformers import SentenceTransformer

import fmicl
from fmicl.divergences import Tsallis
from fmicl.integrations.sentence_transformers import FMICLLoss
from fmicl.losses.deflection import deflection
from fmicl.losses.similarities import make_similarity
from tiny_bert import SENTENCES, tiny_bert

MODES = ("anchor", "cross", "both")
SOFT: dict[str, Any] = {"alpha": 3.0, "gamma": 1.0}  # every pair counts


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> SentenceTransformer:
    return tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def model(untrained: SentenceTransformer) -> SentenceTransformer:
    return copy.deepcopy(untrained)


def tokens(model: SentenceTransformer, sentences: list[str]) -> dict[str, Tensor]:
    return model.preprocess(sentences)


def columns(model: SentenceTransformer, number: int, rows: int = 4) -> list[dict[str, Tensor]]:
    return [tokens(model, SENTENCES[i * rows : (i + 1) * rows]) for i in range(number)]


def embeddings(model: SentenceTransformer, batch: list[dict[str, Tensor]]) -> list[Tensor]:
    return [model(dict(column))["sentence_embedding"] for column in batch]


@pytest.mark.parametrize("divergence", fmicl.list_divergences())
def test_pairs_are_the_loss_on_embeddings(model: SentenceTransformer, divergence: str) -> None:
    model.eval()
    batch = columns(model, 2)
    x, y = embeddings(model, batch)
    expected = fmicl.FMICLLoss(divergence, **SOFT)(x, y)
    assert torch.equal(FMICLLoss(model, divergence, **SOFT)(batch, None), expected)


def test_the_defaults_are_the_papers_for_text(model: SentenceTransformer) -> None:
    model.eval()
    batch = columns(model, 2)
    x, y = embeddings(model, batch)
    assert torch.equal(FMICLLoss(model)(batch, None), fmicl.FMICLLoss("kl", alpha=409600.0, gamma=20.0)(x, y))


@pytest.mark.parametrize("number", [2, 3])
def test_a_learned_f_is_trained_by_its_deflection(model: SentenceTransformer, number: int) -> None:
    """Also with a column of negatives, whose part in the loss has no gradient in the weights either."""
    model.eval()
    batch = columns(model, number)
    loss = FMICLLoss(model, "learned", **SOFT)
    x, y, *_ = (value.detach() for value in embeddings(model, batch))
    kind = loss.objective.divergence
    gain = deflection(x, y, kind, gamma=SOFT["gamma"])
    (expected,) = torch.autograd.grad(-gain / max(1.0, abs(float(gain.detach()))), kind.logits)  # type: ignore[attr-defined]
    (seen,) = torch.autograd.grad(loss(batch, None), kind.logits)  # type: ignore[attr-defined]
    torch.testing.assert_close(seen, expected)


def plain_loss(rows: list[Tensor], divergence: str, mode: str, alpha: float, gamma: float) -> Tensor:
    """The loss by loops over pairs."""
    f = fmicl.divergence(divergence)
    x, y, *given = (torch.nn.functional.normalize(value.double(), dim=1) for value in rows)
    n = len(x)

    def r(a: Tensor, b: Tensor) -> Tensor:
        return -gamma * (a - b).square().sum()

    pairs: list[tuple[Tensor, Tensor]] = []
    for i in range(n):
        for j in range(n):
            if i != j:
                if mode == "anchor":
                    pairs += [(x[i], x[j])]
                elif mode == "cross":
                    pairs += [(x[i], y[j])]
                else:
                    pairs += [(a[i], b[j]) for a in (x, y) for b in (x, y)]
            pairs += [(x[i], column[j]) for column in given]
            if mode == "both":
                pairs += [(y[i], column[j]) for column in given]
    earned = torch.stack([f.score(r(x[i], y[i])) for i in range(n)]).mean()
    cost = torch.stack([f.penalty(r(a, b)) for a, b in pairs]).mean()
    return -(earned - alpha * cost)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("negatives", [0, 1, 3])
@pytest.mark.parametrize("divergence", ["kl", "js", "pearson"])
def test_explicit_negatives_are_added_to_those_of_the_batch(mode: Any, negatives: int, divergence: str) -> None:
    torch.manual_seed(0)
    rows = [torch.randn(5, 6, requires_grad=True) for _ in range(2 + negatives)]
    loss = FMICLLoss(torch.nn.Identity(), divergence, negatives=mode, **SOFT)  # type: ignore[arg-type]
    ours, expected = loss.compute_loss_from_embeddings(rows), plain_loss(rows, divergence, mode, **SOFT)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(ours, rows), torch.autograd.grad(expected, rows), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize("divergence", ["kl", "js"])
@pytest.mark.parametrize("similarity", ["gaussian", "cosine"])
def test_the_shift_is_optimal_over_all_negatives(divergence: str, similarity: Any) -> None:
    """Against a grid of shifts, on the same pairs."""
    torch.manual_seed(0)
    x, y, n = torch.randn(3, 64, 6, dtype=torch.float64)
    settings: dict[str, Any] = {"alpha": 2.0, "gamma": 1.0, "similarity": similarity, "shift": "optimal"}
    loss = FMICLLoss(torch.nn.Identity(), divergence, negatives="cross", **settings)  # type: ignore[arg-type]
    with_columns = loss.compute_loss_from_embeddings([x, y, n])
    critic = make_similarity(similarity, 1.0).critic(fmicl.divergence(divergence), 6)
    unit = [torch.nn.functional.normalize(value, dim=1) for value in (x, y, n)]
    scores = critic.score(critic.z(unit[0] @ torch.cat(unit[1:]).T))
    mask = ~torch.eye(64, 128, dtype=torch.bool)
    earned = critic.score(critic.pairs(unit[0], unit[1])).mean()
    bounds = [
        float(v + 2.0 * critic.divergence.conjugate(scores[mask] - v).mean() - earned)
        for v in torch.linspace(-6, 6, 1201, dtype=torch.float64)
    ]
    assert float(with_columns) == pytest.approx(min(bounds), abs=1e-4)


def test_a_batch_of_one_pair_has_explicit_negatives_only() -> None:
    torch.manual_seed(0)
    x, y, n = torch.randn(3, 1, 6)
    for mode in MODES:
        loss = FMICLLoss(torch.nn.Identity(), "js", negatives=mode, **SOFT)  # type: ignore[arg-type]
        plain = fmicl.FMICLLoss("js", **SOFT)
        assert torch.equal(loss.compute_loss_from_embeddings([x, y]), plain.terms(x, y, n).alignment)
        expected = plain_loss([x, y, n], "js", mode, **SOFT)
        torch.testing.assert_close(
            loss.compute_loss_from_embeddings([x, y, n]).double(), expected, rtol=1e-5, atol=1e-6
        )


def test_half_precision_changes_only_the_rounding_of_the_input() -> None:
    """At the paper's alpha and gamma, where half-precision sums would be wrong."""
    torch.manual_seed(0)
    base = torch.randn(16, 64)
    rows = [(base + 0.3 * torch.randn(16, 64)).bfloat16() for _ in range(3)]
    loss = FMICLLoss(torch.nn.Identity())  # type: ignore[arg-type]
    with torch.autocast("cpu", torch.bfloat16):
        ours = loss.compute_loss_from_embeddings(rows)
    expected = plain_loss(rows, "kl", "anchor", 409600.0, 20.0)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=0)


def test_single_sentences_are_two_dropout_views_of_one_batch(model: SentenceTransformer) -> None:
    model.train()
    seen: list[tuple[Tensor, Tensor]] = []

    def keep(_: Any, inputs: Any, output: Any) -> None:
        seen.append((inputs[0]["input_ids"], output["sentence_embedding"]))

    model.register_forward_hook(keep)
    batch = columns(model, 1, rows=6)
    batch[0]["prompt_length"] = 0  # type: ignore[assignment]
    loss = FMICLLoss(model, "kl", **SOFT)(batch, None)
    assert len(seen) == 1
    ids, rows = seen[0]
    assert ids.shape[0] == 12
    assert torch.equal(ids[:6], ids[6:])
    x, y = rows[:6], rows[6:]
    assert not bool((x == y).all(dim=1).any())
    assert torch.equal(loss, fmicl.FMICLLoss("kl", **SOFT)(x, y))


def test_without_dropout_the_two_views_are_one(model: SentenceTransformer) -> None:
    model.eval()
    batch = columns(model, 1)
    (x,) = embeddings(model, batch)
    ours = FMICLLoss(model, "js", **SOFT)(batch, None)
    torch.testing.assert_close(ours, fmicl.FMICLLoss("js", **SOFT)(x, x), rtol=1e-5, atol=1e-6)


def test_packed_sequences_need_two_passes() -> None:
    """Without a row for each sentence the batch can't be doubled."""
    calls = []

    class Packed(torch.nn.Module):
        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            calls.append(features)
            return {**features, "sentence_embedding": torch.randn(3, 4)}

    for features in ({"input_ids": torch.arange(9)}, {"input_ids": torch.ones(1, 9), "cu_seq_lens_q": torch.arange(4)}):
        calls.clear()
        FMICLLoss(Packed(), **SOFT)([features], None)  # type: ignore[arg-type]
        assert len(calls) == 2


@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_gradient_reaches_every_weight_of_the_encoder(model: SentenceTransformer, number: int) -> None:
    FMICLLoss(model, "kl", **SOFT)(columns(model, number), None).backward()
    for name, weight in model.named_parameters():
        if "pooler" not in name:  # BERT's own, which mean pooling does not use
            assert weight.grad is not None, name
            assert bool(weight.grad.isfinite().all()), name
    assert any(bool(weight.grad.any()) for weight in model.parameters() if weight.grad is not None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"divergence": "kll"}, "kl"),
        ({"alpha": 0.0}, "alpha=0"),
        ({"gamma": -1.0}, "gamma=-1"),
        ({"negatives": "all"}, "'all'"),
        ({"similarity": "dot"}, "'dot'"),
        ({"similarity": fmicl.Cosine(0.1), "gamma": 20.0}, r"gamma=20\.0$"),
        ({"shift": "best"}, "'best'"),
        ({"gather_across_devices": "yes"}, "gather='yes'"),
    ],
)
def test_wrong_settings_are_refused_before_training(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        FMICLLoss(torch.nn.Identity(), **settings)  # type: ignore[arg-type]


def test_wrong_columns_are_refused() -> None:
    loss = FMICLLoss(torch.nn.Identity())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 columns"):
        loss([], None)
    with pytest.raises(ValueError, match=r"\(4, 3\).*\(2, 3\)"):
        loss.compute_loss_from_embeddings([torch.ones(2, 3), torch.ones(2, 3), torch.ones(4, 3)])


def test_labels_are_refused(model: SentenceTransformer) -> None:
    loss = FMICLLoss(model)
    x = torch.randn(4, 8)
    with pytest.raises(ValueError, match="label"):
        loss.compute_loss_from_embeddings([x, x], torch.zeros(4))
    with pytest.raises(ValueError, match="label"):
        loss([], labels=torch.tensor([1.0, 0.0]))


def test_a_similarity_object_has_its_own_gamma() -> None:
    torch.manual_seed(0)
    rows = list(torch.randn(3, 4, 6))
    ours, named = (
        FMICLLoss(torch.nn.Identity(), "js", **settings)  # type: ignore[arg-type]
        for settings in ({"similarity": fmicl.Cosine(0.1)}, {"similarity": "cosine", "gamma": 5.0})
    )
    assert torch.equal(ours.compute_loss_from_embeddings(rows), named.compute_loss_from_embeddings(rows))
    config = ours.get_config_dict()
    assert config["similarity"] == repr(fmicl.Cosine(0.1))
    assert not {"gamma", "mu"} & set(config)


def test_config_for_the_model_card(model: SentenceTransformer) -> None:
    loss = FMICLLoss(model, "js", alpha=40.0, gamma=2.0)
    assert json.loads(json.dumps(loss.get_config_dict())) == {
        "divergence": "js", "alpha": 40.0, "gamma": 2.0, "mu": 1.0, "similarity": "gaussian", "negatives": "anchor",
        "shift": None, "gather_across_devices": True,
    }  # fmt: skip
    assert FMICLLoss(model, Tsallis(order=2.5)).get_config_dict()["divergence"] == "Tsallis(order=2.5)"
    assert "f-{MICL}" in loss.citation


@pytest.mark.parametrize("number", [1, 2, 4])
def test_the_trainer_trains_saves_and_loads(model: SentenceTransformer, tmp_path: Path, number: int) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed (the extra text)")
    pytest.importorskip("accelerate", reason="accelerate is not installed (the extra text)")
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments

    names = ["anchor", "positive", "negative_1", "negative_2"][:number]
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    # Nine rows in batches of four: the last batch is a single row.
    data = datasets.Dataset.from_dict({name: SENTENCES[3 * i : 3 * i + 9] for i, name in enumerate(names)})
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-2, use_cpu=True,
        report_to="none", save_strategy="no", eval_strategy="steps", eval_steps=4, logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    loss = FMICLLoss(model, "kl", alpha=40.0, gamma=1.0)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, eval_dataset=data, loss=loss)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(logged) == 4
    assert all(torch.tensor(logged).isfinite())
    moved = [name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])]
    assert {"embeddings", "encoder"} <= {part for name in moved for part in name.split(".")}
    model.save_pretrained(str(tmp_path / "saved"))
    assert "FMICLLoss" in (tmp_path / "saved" / "README.md").read_text()
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    torch.testing.assert_close(
        torch.as_tensor(again.encode(SENTENCES)), torch.as_tensor(model.encode(SENTENCES)), rtol=0, atol=1e-6
    )


def test_within_matryoshka_loss(model: SentenceTransformer) -> None:
    from sentence_transformers.sentence_transformer.losses import MatryoshkaLoss

    model.eval()
    batch = columns(model, 2)
    x, y = embeddings(model, batch)
    plain = fmicl.FMICLLoss("js", **SOFT)
    ours = MatryoshkaLoss(model, FMICLLoss(model, "js", **SOFT), [8, 4])(batch, None)
    torch.testing.assert_close(ours, plain(x, y) + plain(x[:, :4], y[:, :4]), rtol=1e-5, atol=1e-6)
