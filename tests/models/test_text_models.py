"""Sentence encoders: pooling, tokenizers, loading, export to sentence-transformers."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (the extra text)")

from sentence_transformers import SentenceTransformer
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5Model,
)

from fmicl.models.text import (
    SentenceEncoder,
    Tokenizer,
    build_sentence_encoder,
    nested_modules,
    save_sentence_encoder,
    sentence_head,
)
from tiny_bert import SENTENCES, WORDS, tiny_bert


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "bert"
    tiny_bert(folder)
    return folder


def build(folder: Path, pooling: Any = "cls") -> tuple[SentenceEncoder, Tokenizer]:
    torch.manual_seed(0)
    return build_sentence_encoder(str(folder), pooling)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_padding_changes_nothing(bert: Path, pooling: Any) -> None:
    encoder, tokenizer = build(bert, pooling)
    encoder.eval()
    together = encoder(tokenizer.batch(SENTENCES, 16))
    assert together.shape == (len(SENTENCES), encoder.num_features)
    for row, sentence in zip(together, SENTENCES, strict=True):
        ids = torch.tensor(tokenizer.encode([sentence], 16))
        states = encoder.model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state[0]
        torch.testing.assert_close(row, states[0] if pooling == "cls" else states.mean(dim=0), atol=1e-5, rtol=1e-5)


def test_dropout_is_on_and_makes_two_views(bert: Path) -> None:
    encoder, tokenizer = build(bert)
    assert encoder.training
    ids = tokenizer.batch(SENTENCES[:4], 16)
    one, two = encoder(torch.cat([ids, ids])).chunk(2)
    assert not torch.isclose(one, two).all(dim=1).any()


def test_truncation_keeps_the_last_special_token(bert: Path) -> None:
    _, tokenizer = build(bert)
    (row,) = tokenizer.encode(["a man plays guitar a man plays guitar"], 6)
    assert len(row) == 6
    assert row[-1] == tokenizer.inner.sep_token_id
    assert tokenizer.limit == 16


def test_the_state_of_a_tokenizer_depends_on_its_vocabulary_only(bert: Path, tmp_path: Path) -> None:
    state = build(bert)[1].state()
    _, used = build(bert)
    used.encode(SENTENCES, 5)
    used.inner(SENTENCES, padding=True)
    assert used.state() == state
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS[::-1]]))
    assert Tokenizer(BertTokenizer(str(tmp_path / "vocab.txt")), 16).state() != state


def test_the_head_is_initialised_as_berts_pooler() -> None:
    torch.manual_seed(0)
    head = sentence_head("cls_mlp", 200, std=0.05)
    weight, bias = head.state_dict().values()
    assert weight.shape == (200, 200)
    assert float(weight.std()) == pytest.approx(0.05, rel=0.02)
    assert not bias.any()
    x = torch.randn(3, 200)
    torch.testing.assert_close(head(x), torch.tanh(x @ weight.T))
    for pooling in ("cls", "mean"):
        assert not list(sentence_head(pooling, 200).parameters())


def test_unused_parameters_are_frozen(bert: Path) -> None:
    encoder, _ = build(bert)
    frozen = {name for name, parameter in encoder.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.pooler.dense.weight", "model.pooler.dense.bias"}
    assert all(parameter.grad is None for parameter in encoder.parameters())


def test_a_run_folder_can_be_loaded(bert: Path, tmp_path: Path) -> None:
    """It is a sentence-transformers folder with the transformer in a subfolder."""
    encoder, tokenizer = build(bert)
    with torch.no_grad():
        next(encoder.parameters()).add_(1.0)
    save_sentence_encoder(encoder, tokenizer, 16, tmp_path / "sentence_transformer")
    modules = nested_modules(tmp_path, tmp_path / "sentence_transformer")
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    again, words = build(tmp_path)
    ids = tokenizer.batch(SENTENCES, 16)
    assert torch.equal(words.batch(SENTENCES, 16), ids)
    torch.testing.assert_close(again.eval()(ids), encoder.eval()(ids))
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no config\.json"):
        build(tmp_path)


def test_a_masked_language_model_can_be_loaded(bert: Path, tmp_path: Path) -> None:
    """Its pooler is missing, and its head is not used."""
    model: Any = BertForMaskedLM(BertConfig.from_pretrained(bert))
    model.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    BertTokenizer.from_pretrained(bert).save_pretrained(tmp_path)
    encoder, tokenizer = build(tmp_path)
    again, _ = build(tmp_path)
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
    for name, value in model.bert.state_dict().items():
        assert torch.equal(encoder.state_dict()[f"model.{name}"], value.float()), name
    for name, value in again.state_dict().items():  # the pooler's included
        assert torch.equal(encoder.state_dict()[name], value), name
    assert encoder(tokenizer.batch(SENTENCES, 16)).shape == (len(SENTENCES), 8)


def test_length_limit_of_models_that_count_positions_from_the_padding(bert: Path, tmp_path: Path) -> None:
    config = RobertaConfig(
        vocab_size=len(WORDS) + 5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=12, pad_token_id=1, type_vocab_size=1,
    )  # fmt: skip
    RobertaModel(config).save_pretrained(tmp_path)
    BertTokenizer.from_pretrained(bert, pad_token="[UNK]").save_pretrained(tmp_path)
    encoder, tokenizer = build(tmp_path)
    assert (encoder.padding, tokenizer.limit) == (1, 10)
    sentence = "a man plays guitar the dog sings fast two red food ."
    assert encoder(tokenizer.batch([sentence, "a man"], tokenizer.limit)).shape == (2, 8)


def test_without_a_network_the_hub_is_not_retried(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object) -> None:
        raise socket.gaierror("Name or service not known")

    waited: list[float] = []
    cache = tmp_path / "models--me--tiny"
    shutil.copytree(bert, cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("socket.getaddrinfo", nowhere)
    monkeypatch.setattr("time.sleep", waited.append)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NO_PROXY", "localhost")  # is no proxy
    encoder, _ = build_sentence_encoder("me/tiny", "cls")  # it was downloaded before
    assert encoder.num_features == build(bert)[0].num_features
    with pytest.raises(ValueError, match=r"me/other.*hub"):
        build_sentence_encoder("me/other", "cls")
    assert not waited


def test_models_that_cannot_be_loaded_are_a_one_line_error(
    bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("/nowhere/bert", "./bert", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=f"{name}"):
            build_sentence_encoder(name, "cls")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"nobody/nothing.*hub") as error:
        build_sentence_encoder("nobody/nothing", "cls")
    assert "\n" not in str(error.value)
    assert "experiments/warm_start.py" in str(error.value)
    with pytest.raises(ValueError, match=r"no config\.json"):
        build_sentence_encoder(str(tmp_path), "cls")
    config = T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5Model(config).save_pretrained(tmp_path / "t5")
    BertTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match=r"T5Model"):
        build_sentence_encoder(str(tmp_path / "t5"), "cls")


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_saved_encoder_gives_the_same_vectors(bert: Path, tmp_path: Path, pooling: Any) -> None:
    encoder, tokenizer = build(bert, pooling)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tokenizer.encode(SENTENCES, 5)  # what it was last called with is not what is saved
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").write_text("replaced")
    save_sentence_encoder(encoder, tokenizer, 11, folder)
    model = SentenceTransformer(str(folder), device="cpu")
    assert model.max_seq_length == 11
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not (folder / "old").exists()
    assert len({path.stat().st_mode for path in folder.rglob("*") if path.is_file()}) == 1  # weights are no secret
    long = [*SENTENCES, " ".join(SENTENCES[:5])]
    with torch.no_grad():
        ours = encoder.eval()(tokenizer.batch(long, 11))
    torch.testing.assert_close(model.encode(long, convert_to_tensor=True), ours, atol=1e-5, rtol=0)
    assert not torch.isclose(ours.norm(dim=1), torch.tensor(1.0)).all()  # not normalised
