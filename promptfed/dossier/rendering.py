"""A dossier as Markdown and as HTML. Both hold the same; facts that the record lacks are named as such."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from promptfed.dossier.facts import Fact, Facts, Row
from promptfed.dossier.kinds import FORMS, Form, Kind, Section
from promptfed.shared.plain_text import markdown_cell, plain

BLANK = "[TO FILL]"
NOT_HELD = "the record does not hold this"
PREFACE = (
    "A draft. Every figure was read from the record, at the source beside it. What the record does not hold is not "
    f"claimed. {BLANK} marks what a person has to write. It is no legal advice."
)

Cells = Sequence[str]


def in_section(section: Section, facts: Facts) -> list[Fact]:
    """The facts of a section that the record holds."""
    return [facts[key] for key in section.facts if key in facts]


def as_markdown(kind: Kind, facts: Facts, title: str) -> str:
    """The dossier as Markdown."""
    return "\n".join(_blocks(FORMS[kind], facts, title, _Markdown())) + "\n"


def as_html(kind: Kind, facts: Facts, title: str) -> str:
    """The dossier as one HTML page."""
    body = "\n".join(_blocks(FORMS[kind], facts, title, _Html()))
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


STYLE = (
    "body{font:16px/1.5 sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}table{border-collapse:collapse}"
    "td,th{border:1px solid #999;padding:.2rem .5rem;text-align:left;vertical-align:top}mark{background:#fd6}"
)


def _blocks(form: Form, facts: Facts, title: str, to: _Markdown | _Html) -> Iterator[str]:
    yield to.heading(1, f"{form.title}: {title}")
    yield to.paragraph(PREFACE)
    yield to.heading(2, "Checklist")
    yield to.paragraph(f"Provisions of {form.law}.")
    rows = []
    for number, section in enumerate(form.sections, 1):
        held = str(len(in_section(section, facts)))
        rows += [(one, f"{number}. {section.title}", held, str(len(section.blanks))) for one in section.provisions]
    yield to.table(("provision", "section", "facts from the record", "blanks"), rows)
    for number, section in enumerate(form.sections, 1):
        yield to.heading(2, f"{number}. {section.title}")
        yield to.paragraph(f"Answers {', '.join(section.provisions)}.")
        found = in_section(section, facts)
        single = [(fact.label, _text(fact.value), fact.source) for fact in found if not isinstance(fact.value, list)]
        if single:
            yield to.table(("fact", "value", "source"), single)
        for fact in found:
            if isinstance(fact.value, list):
                yield to.heading(3, fact.label)
                yield to.paragraph(f"Source: {fact.source}")
                yield _table(fact.value, to)
        for blank in section.blanks:
            yield to.blank(blank)


def _table(rows: Sequence[Row], to: _Markdown | _Html) -> str:
    if not rows:
        return to.paragraph("None.")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return to.table(columns, [[_text(row.get(column)) for column in columns] for row in rows])


def _text(value: object) -> str:
    if value is None:
        return NOT_HELD
    return repr(value) if isinstance(value, float) else str(value)


class _Markdown:
    def heading(self, level: int, text: str) -> str:
        return f"{'#' * level} {markdown_cell(text)}\n"

    def paragraph(self, text: str) -> str:
        return f"{markdown_cell(text)}\n"

    def table(self, head: Cells, rows: Sequence[Cells]) -> str:
        lines = [head, ["---"] * len(head), *[[markdown_cell(cell) for cell in row] for row in rows]]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def blank(self, text: str) -> str:
        return f"**{BLANK}** {text}\n"


class _Html:
    def heading(self, level: int, text: str) -> str:
        return f"<h{level}>{escape(plain(text))}</h{level}>"

    def paragraph(self, text: str) -> str:
        return f"<p>{escape(plain(text))}</p>"

    def table(self, head: Cells, rows: Sequence[Cells]) -> str:
        cells = [self._row("th", head), *(self._row("td", row) for row in rows)]
        return f"<table>{''.join(cells)}</table>"

    def _row(self, kind: str, cells: Cells) -> str:
        return f"<tr>{''.join(f'<{kind}>{escape(plain(cell, keep=chr(10)))}</{kind}>' for cell in cells)}</tr>\n"

    def blank(self, text: str) -> str:
        return f"<p><mark>{BLANK}</mark> {escape(text)}</p>"
