"""Images of a PACS on this disk: what a table of labels names is fetched once, without its identifiers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from promptfed.shared.data.folder import skips
from promptfed.shared.data.medical.index import Index
from promptfed.shared.data.medical.keys import PACS, Keys, home
from promptfed.shared.data.medical.readers import Request, readers
from promptfed.shared.data.medical.table import COLUMNS, read_table, refuse
from promptfed.shared.data.options import Options
from promptfed.shared.data.source import DataError
from promptfed.shared.files import write_whole

LISTED = "listed.json"  # the files of each line of a table, by keyed ids
SECONDS = 180.0  # for a search, or for an image with its decoding
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def fetched(url: str, options: Options, settings: Mapping[str, Any]) -> tuple[Path, tuple[str, ...]]:
    """The folder with the images of all lines of the table ``labels=``; what it has is not fetched again.

    Also a sentence for each image that cannot be decoded, which the owner allows to leave out.

    Raises:
        DataError: the PACS cannot be used, or does not answer as it should, or an image cannot be decoded.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
        raise DataError(f"{options.uri}: give the PACS as https://HOST/PATH, without a password.")
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK:
        raise DataError(f"{options.uri}: images travel unencrypted by http; give an https address.")
    given = options.text("labels")
    if given is None:
        raise DataError(f"{options.uri}: give the table of labels with labels=FILE.")
    table = read_table(Path(given).expanduser(), tuple(COLUMNS), options)
    folder, within = home(options.text("index")), _study(options)
    keys = Keys(folder, options.uri)
    cache = folder / f"{PACS}{keys.id('pacs', url, *within.values())}"
    cache.mkdir(exist_ok=True, mode=0o700)
    index = Index("dicom", cache, folder, keys, settings)
    remote = {"url": url, "token": _token(options)}
    listed = _listed(cache)
    names = [keys.id("line", table.key, value) for value in table.values]
    new = [line for line, name in enumerate(names) if not all(map(index.knows, listed.get(name) or [""]))]
    problems: list[str] = []
    for line in tqdm(new, "studies", leave=False, disable=None if new else True):
        where = f"the table of labels, line {table.numbers[line]}"
        try:
            files, wrong = _line(index, {**remote, "search": {**within, table.key: table.values[line]}}, remote)
        except Refused as error:
            raise DataError(f"{options.uri}: {where}: {error}.") from None
        problems += [f"{where}: an image of the PACS: {reason}." for reason in wrong]
        if not wrong:
            listed[names[line]] = files
            write_whole(cache / LISTED, json.dumps(listed).encode(), mode=0o600)
    if problems and not skips(options):
        refuse(options, [(text, text) for text in problems], "on_unreadable=skip leaves them out.")
    return cache, tuple(problems)


def _listed(cache: Path) -> dict[str, list[str]]:
    """The files of each line, by its keyed id."""
    try:
        known: dict[str, list[str]] = json.loads((cache / LISTED).read_text())
    except FileNotFoundError:
        return {}
    return known


def _study(options: Options) -> dict[str, str]:
    """The search within the one study of ``study=``. Raises DataError."""
    given = options.text("study")
    if given is None:
        return {}
    if re.fullmatch(r"[0-9.]{1,64}", given) is None:
        raise DataError(f"{options.uri}: study is no UID; give the StudyInstanceUID, as in study=1.2.840.1.")
    return {"StudyInstanceUID": given}


class Refused(Exception):
    """The PACS does not answer as it should; the text has no value of a header."""


def _line(index: Index, search: Mapping[str, Any], remote: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Fetch the images of one line: the names of their files, and why others cannot be decoded."""
    answer = readers().submit(Request("facts", "dicomweb", "", 0, dict(search), SECONDS)).result()
    if answer.facts is None:
        raise Refused(answer.error)
    wanted = {f"{index.keys.id('sop', uids[-1])}.dcm": uids for uids in answer.facts["found"]}
    new = {name: uids for name, uids in wanted.items() if not index.knows(name)}
    requests = (
        Request("facts", "dicomweb", str(index.root / name), 0, {**remote, "fetch": uids}, SECONDS)
        for name, uids in new.items()
    )
    wrong = []
    for name, told in zip(new, readers().each(requests), strict=True):
        if told.error is not None:
            raise Refused(told.error)
        if told.facts is None:  # a report, a plan
            del wanted[name]
        elif "unreadable" in told.facts:
            wrong.append(told.facts["unreadable"])
        else:
            index.note(name, told.facts)
    return list(wanted), wrong


def _token(options: Options) -> str | None:
    """The bearer token in the file ``token=``."""
    given = options.text("token")
    if given is None:
        return None
    try:
        return Path(given).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError):
        raise DataError(f"{options.uri}: the file of the token cannot be read; check token=FILE.") from None
