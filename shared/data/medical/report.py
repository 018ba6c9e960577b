"""The report of a check as one HTML file with thumbnails, for the owner of the data only."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape

from PIL import ImageDraw

from promptfed.shared.data.medical.check import KINDS, Finding, Looks
from promptfed.shared.data.source import Split
from promptfed.shared.plain_text import counted, plain

SHOWN, IMAGES = 100, 6  # findings of a kind, and images of a finding
_THUMBNAIL = 128
_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Check of images</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<style>body{font:15px/1.45 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}
figure{display:inline-block;margin:.3rem;width:11rem;vertical-align:top}figcaption{font-size:12px;overflow-wrap:anywhere}
td,th{padding:.15rem .8rem .15rem 0;text-align:left}.own{background:#fff3cd;padding:.6rem}</style></head><body>
<h1>Check of images</h1><p class="own">This page names files and shows images. It is for the owner of the data.</p>"""


def html_report(uri: str, looks: Looks, found: Sequence[Finding], left_out: Sequence[str], split: Split) -> str:
    """The page. ``left_out``: a sentence for each file that cannot be read."""
    by_kind = {kind: [one for one in found if one.kind == kind] for kind in KINDS}
    count = {kind: len(left_out) if kind == "unreadable" else len(those) for kind, those in by_kind.items()}
    rows = "".join(f"<tr><td>{escape(KINDS[kind])}</td><td>{count[kind]:,}</td></tr>" for kind in KINDS)
    parts = [_HEAD, f"<p>{_text(uri)}: {counted(len(split), 'image')}</p><table>{rows}</table>"]
    if left_out:
        items = "".join(f"<li>{_text(problem)}</li>" for problem in left_out[:SHOWN])
        parts.append(f"<h2>{escape(KINDS['unreadable'])}</h2><ul>{items}</ul>")
    for kind, those in by_kind.items():
        if those:
            parts.append(f"<h2>{escape(KINDS[kind])} ({len(those):,})</h2>")
            parts += [_finding(one, looks, split) for one in those[:SHOWN]]
    return "\n".join([*parts, "</body></html>"])


def _text(text: str) -> str:
    return escape(plain(text))


def _finding(finding: Finding, looks: Looks, split: Split) -> str:
    figures = "".join(_figure(finding, row, looks, split) for row in finding.rows[:IMAGES])
    more = f"<p>and {len(finding.rows) - IMAGES:,} more</p>" if len(finding.rows) > IMAGES else ""
    return f"<div><p>{_text(finding.text)}</p>{figures}{more}</div>"


def _figure(finding: Finding, row: int, looks: Looks, split: Split) -> str:
    image = split.image(row)
    box = looks.texts[row]
    if finding.kind == "text" and box is not None:
        ImageDraw.Draw(image).rectangle(box, outline="red", width=max(1, image.width // 200))
    image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    stream = io.BytesIO()
    image.save(stream, "PNG")
    source = base64.b64encode(stream.getvalue()).decode()
    label = ", ".join(label_names(looks, row))
    return (
        f'<figure><img alt="" src="data:image/png;base64,{source}">'
        f"<figcaption>{_text(looks.origins[row].path)}<br>{_text(label)}</figcaption></figure>"
    )


def label_names(looks: Looks, row: int) -> list[str]:
    """The classes of an image."""
    labels = looks.labels[row]
    if labels.ndim == 0:
        return [looks.class_names[int(labels)]] if labels >= 0 else []
    return [name for name, has in zip(looks.class_names, labels, strict=True) if has == 1]
