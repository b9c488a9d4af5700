"""A small STS folder in SentEval's layout."""

from __future__ import annotations

from pathlib import Path

PARTS = {
    "STS12": ["MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"],
    "STS13": ["FNWN", "headlines", "OnWN"],
    "STS14": ["deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"],
    "STS15": ["answers-forums", "answers-students", "belief", "headlines", "images"],
    "STS16": ["answer-answer", "headlines", "plagiarism", "postediting", "question-question"],
}
HEADER = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"


def write_sts(folder: Path) -> None:
    """All seven tasks, with three or four pairs in each file."""
    for year, parts in PARTS.items():
        inner = folder / "STS" / f"{year}-en-test"
        inner.mkdir(parents=True)
        for number, part in enumerate(parts):
            pairs = [(f"{year} {part} one .", f"{part}  two"), (f"{part} three", f"{part} three"), ("x y", f"z {part}")]
            (inner / f"STS.input.{part}.txt").write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
            (inner / f"STS.gs.{part}.txt").write_text(f"{number}.5\n5.000\n0.25\n")
    bench = folder / "STS" / "STSBenchmark"
    bench.mkdir()
    rows = [
        ("5.000", "a cat", "a cat"),
        ("4.200", "the dog", "a dog"),
        ("4.0", "x", "yy"),
        ("0.0", "a", "b c"),
    ]
    for split in ("train", "dev", "test"):
        text = "".join(f"genre\tfile\tyear\t{i}\t{s}\t{a}\t{b}\textra\n" for i, (s, a, b) in enumerate(rows))
        (bench / f"sts-{split}.csv").write_text(text)
    (folder / "SICK").mkdir()
    lines = "1\tA man\tA woman\t3.1\tNEUTRAL\n2\tA boy\tA boy\t4.9\tENTAILMENT\n3\tTwo\tThree\t1.0\tNEUTRAL\n"
    (folder / "SICK" / "SICK_test_annotated.txt").write_text(HEADER + lines)
