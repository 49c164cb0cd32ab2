"""The report as one HTML file that needs nothing beside it: figures are embedded, and there are no scripts."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape

from scalerl.sweeps.report import Report, Row
from scalerl.sweeps.tables import FIGURES, HEADERS, cells, differences

_TITLES = {"loo": "Leave-one-out study", "forward": "Forward study", "recipes": "Recipes", "seeds": "Seeds"}
# kind of verdict -> the class that colours its tag
_TONES = {
    "base": "plain",
    "identical": "plain",
    "tie": "plain",
    "lower": "bad",
    "slower": "bad",
    "less-steep": "bad",
    "no-fit": "bad",
    "higher": "good",
    "faster": "good",
    "steeper": "good",
}
_TAGS = {
    "lower": "lower ceiling",
    "higher": "higher ceiling",
    "less-steep": "less steep",
    "open": "ceiling open",
    "no-fit": "no fit",
    "no-base": "no verdict",
    "no-data": "no data",
}
_STYLE = """
:root { --ink: #1c2733; --soft: #5b6773; --line: #dfe4e8; --bad: #a33b00; --good: #00654a; --open: #7a5b00; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 68rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
p.made { color: var(--soft); margin: 0; overflow-wrap: anywhere; }
code { font: .88em ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
ul.verdicts { list-style: none; margin: 0; padding: 0; }
ul.verdicts li { display: grid; grid-template-columns: 14rem 1fr; gap: .2rem 1rem; padding: .55rem 0;
  border-bottom: 1px solid var(--line); break-inside: avoid; }
ul.verdicts b { overflow-wrap: anywhere; }
.tag { display: inline-block; padding: 0 .5rem; border: 1px solid currentColor; border-radius: 1rem; font-size: .8rem;
  margin-right: .4rem; white-space: nowrap; color: var(--soft); }
.tag.bad { color: var(--bad); } .tag.good { color: var(--good); } .tag.open { color: var(--open); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { text-align: right; vertical-align: top; padding: .35rem .5rem; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: anywhere; }
th { border-bottom: 2px solid var(--ink); font-weight: 600; }
td small { color: var(--soft); }
table.words td, table.words th { text-align: left; white-space: normal; overflow-wrap: anywhere; }
figure { margin: 1.2rem 0; break-inside: avoid; }
figure img { max-width: 100%; height: auto; display: block; }
figcaption, ul.notes { color: var(--soft); font-size: .9rem; }
@media (max-width: 40rem) { ul.verdicts li { grid-template-columns: 1fr; } }
@media print { body { font-size: 10pt; } main { max-width: none; padding: 0; } h2 { break-after: avoid; }
  table { font-size: 7.5pt; } .scroll { overflow: visible; } tr { break-inside: avoid; } }
"""


def page(report: Report, figures: Mapping[str, bytes]) -> str:
    """figures: PNG bytes by the names of `tables.FIGURES`."""
    plan = report.plan
    title = f"{_TITLES.get(plan.kind, 'Study')}: {plan.name}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="made">Made by <code>{escape(plan.command)}</code></p>',
        "<h2>Verdicts</h2>",
        '<ul class="verdicts">' + "".join(map(_verdict, report.rows)) + "</ul>",
    ]
    if report.troubles:
        parts += ["<h2>Runs that are not whole</h2>", _list(report.troubles)]
    parts += ["<h2>Table</h2>", _table(HEADERS, [cells(row) for row in report.rows])]
    parts += ["<h2>Figures</h2>", *(_figure(name, figures[name], text) for name, text in FIGURES.items())]
    parts += ["<h2>What the numbers rest on</h2>", _list(report.notes)]
    if changes := differences(report):
        parts += ["<h2>What each arm changes</h2>", _table(("arm", "key", "base", "arm's"), changes, kind="words")]
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
    )
    return f"{head}<body>\n<main>\n" + "\n".join(parts) + "\n</main>\n</body>\n</html>\n"


def _verdict(row: Row) -> str:
    kind = row.verdict.kind
    tag = ("" if row.verdict.sure else "perhaps ") + _TAGS.get(kind, kind)
    tone = _TONES.get(kind, "open") if row.verdict.sure else "open"
    tagged = f'<span class="tag {tone}">{escape(tag)}</span>'
    return f"<li><b>{escape(row.name)}</b><span>{tagged}{escape(row.verdict.text)}</span></li>"


def _list(lines: Sequence[str]) -> str:
    return '<ul class="notes">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "numbers") -> str:
    def cell(text: str) -> str:
        first, _, rest = text.partition("\n")
        return f"<td>{escape(first)}" + (f"<br><small>{escape(rest)}</small>" if rest else "") + "</td>"

    head = "".join(f"<th>{escape(header)}</th>" for header in headers)
    body = "".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _figure(name: str, png: bytes, caption: str) -> str:
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    alt = escape(f"{name.partition('.')[0]}: {caption}", quote=True)
    return f'<figure><img src="{source}" alt="{alt}"><figcaption>{escape(caption)}</figcaption></figure>'
