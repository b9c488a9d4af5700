"""Pieces of the report's page: values as escaped text, tables, and the document around them."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from fmicl.runs.figures import COLOURS, Theme

NAMES = {
    "knn": "k-NN",
    "linear": "Linear probe",
    "linear_views": "Linear probe, on views too",
    "lr": "Learning rate",
    "stsb_dev": "STS-B dev",
    "raw_pixels": "Raw pixels",
    "untrained": "Untrained encoder",
}
"""What the page calls these keys; others are spelled from the key."""


def flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested objects as one list, with dotted names."""
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            pairs += flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value))
    return pairs


def pairs(values: Iterable[tuple[str, Any]]) -> str:
    """A table of names and values."""
    rows = "".join(f"<tr><th>{escape(key)}</th><td>{show(value)}</td></tr>" for key, value in values)
    return f'<div class="scroll"><table class="pairs">{rows}</table></div>' if rows else ""


def table(head: Iterable[str], rows: Iterable[Iterable[str]], kind: str) -> str:
    """A table of cells that are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def is_number(value: object) -> bool:
    """Whether it is an int or a float, and not a truth value."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def percent(value: Any) -> str:
    """A percentage with one decimal, or whatever it is instead."""
    return f"{value:.1f} %" if is_number(value) and math.isfinite(value) else show(value)


def show(value: Any) -> str:
    """A value as escaped text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "not finite"
        # Counts whole (a step is no 1.2e+05), the rest short: 0.1, not 0.10000000149.
        text = f"{value:.0f}" if value.is_integer() and abs(value) < 1e12 else f"{value:.5g}"
        return text.replace("-", "\N{MINUS SIGN}")
    if isinstance(value, list):
        return ", ".join(show(item) for item in value) if value else "–"
    return escape(str(value))


def words(key: str) -> str:
    """A key as a person would say it."""
    return NAMES.get(key, key.replace("_", " ").capitalize())


def data(png: bytes) -> str:
    """A PNG as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _variables(theme: Theme) -> str:
    colours = COLOURS[theme]
    page = {"light": "#f4f5f7", "dark": "#111418"}[theme]
    return (
        f"--page:{page};--surface:{colours.surface};--ink:{colours.ink};--muted:{colours.muted};"
        f"--line:{colours.line};--accent:{colours.first}"
    )


_STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:68rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 .75rem}
h3{font-size:1rem;margin:1.5rem 0 .25rem}
header p,.where{color:var(--muted);margin:.25rem 0 0;overflow-wrap:anywhere}
section{background:var(--surface);border:1px solid var(--line);border-radius:.75rem;padding:1.25rem;margin-top:1.25rem}
.where{margin:-.5rem 0 1rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem}
.card{border:1px solid var(--line);border-radius:.5rem;padding:.75rem 1rem;display:flex;flex-direction:column}
.card span,.card small{color:var(--muted)}
.card small{font-size:.8rem;line-height:1.35}
.card strong{font-size:1.75rem;line-height:1.3;font-weight:650;font-variant-numeric:tabular-nums}
.card:not(.small) strong{color:var(--accent)}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:1.5rem}
figure{margin:0;min-width:0}
figure.wide{grid-column:1/-1}
figure img{display:block;width:100%;height:auto}
figure.wide img{max-width:46rem;min-width:32rem}
figcaption{color:var(--muted);font-size:.875rem;margin-top:.4rem}
figcaption b{color:var(--ink)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:.35rem .75rem .35rem 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
thead th,.pairs th{color:var(--muted);font-weight:500}
.numbers th:not(:first-child),.numbers td:not(:first-child){text-align:right;padding:.35rem 0 .35rem 1rem}
.numbers th,.numbers td{white-space:nowrap}
.few{max-width:34rem}
.pairs th{width:14rem;font-family:ui-monospace,monospace;font-size:.85em}
.pairs td{overflow-wrap:anywhere}
details{margin-top:1rem}
summary{cursor:pointer;color:var(--accent);padding:.25rem 0}
pre{background:var(--page);border-radius:.5rem;padding:.75rem 1rem;margin:0 0 1rem;overflow-x:auto;font-size:.85rem}
.notes{color:var(--muted)}
.notes ul{margin:0;padding-left:1.2rem;overflow-wrap:anywhere}
@media(max-width:36rem){main{padding:1rem .75rem 3rem}section{padding:1rem}.pairs th{width:42%}}
@media print{body{background:none}section{break-inside:avoid}}
"""


def document(title: str, body: str) -> str:
    """The page around a body that is HTML already."""
    # The policy makes "nothing from elsewhere" a rule that the browser keeps, whatever a run's text holds.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{escape(title)}</title>
<style>
:root{{{_variables("light")}}}
@media(prefers-color-scheme:dark){{:root{{{_variables("dark")}}}}}
{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
