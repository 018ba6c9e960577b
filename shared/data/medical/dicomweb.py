"""A PACS by DICOMweb: searches, and instances stripped of all but what their pixels need. Runs in a child process.

The PACS is not trusted: answers are bounded in size, number and time, redirects are refused, and UIDs are compared with
those that were asked for.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
from dicomweb_client.api import DICOMwebClient
from pydicom.dataset import Dataset
from pydicom.uid import UID

from promptfed.shared.data.medical import dicom
from promptfed.shared.data.medical.pictures import MOST_FRAMES
from promptfed.shared.data.medical.stripped import stripped
from promptfed.shared.data.medical.unreadable import Unreadable
from promptfed.shared.files import write_whole
from promptfed.shared.service.reasons import why

MOST_BYTES = 1 << 30  # of one answer
SECONDS = 50.0  # for one answer
PAGE = 500  # instances of one answer to a search
_UIDS = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")


class _Session(requests.Session):  # type: ignore[misc]
    """A session whose answers are read as a whole within bounds."""

    def request(self, *args: Any, **options: Any) -> requests.Response:
        until = time.monotonic() + SECONDS
        response = super().request(*args, **{**options, "stream": True, "allow_redirects": False})
        if response.is_redirect:
            raise Unreadable("the PACS redirects; give the address that it redirects to, if you trust it")
        parts, size = [], 0
        for part in response.iter_content(1 << 16):
            size += len(part)
            if size > MOST_BYTES or time.monotonic() > until:
                raise Unreadable("an answer of the PACS is too long, or takes too long")
            parts.append(part)
        response._content = b"".join(parts)
        return response


def facts(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The instances of a search, ``{"found": [[study, series, sop], ...]}``; or one instance, fetched into ``path``.

    settings: ``url``, ``token`` (or None), and ``search``, values by keyword, or ``fetch``, the three UIDs.
    """
    session = _Session()
    if settings.get("token"):
        session.headers["Authorization"] = f"Bearer {settings['token']}"
    client = DICOMwebClient(settings["url"], session=session, timeout=SECONDS)
    client.set_http_retry_params(retry=False)
    try:
        if "search" in settings:
            return {"found": _found(client, settings["search"])}
        return _fetched(client, settings["fetch"], path)
    except requests.HTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        raise Unreadable(f"the PACS answers with status {status}") from None
    except requests.RequestException:
        raise Unreadable("the PACS cannot be reached, or its answer is not complete") from None


def _found(client: Any, wanted: Mapping[str, str]) -> list[list[str]]:
    """The UIDs of all instances that match, page by page."""
    found: dict[str, list[str]] = {}
    while True:
        fields = [*_UIDS, *wanted]
        page = client.search_for_instances(search_filters=dict(wanted), fields=fields, limit=PAGE, offset=len(found))
        before = len(found)
        for answer in page:
            told = Dataset.from_json(answer)
            if any(str(told.get(name, value)).strip() != value for name, value in wanted.items()):
                raise Unreadable("the PACS answers with other images than those that were asked for")
            uids = [str(told.get(name, "")) for name in _UIDS]
            if not all(UID(uid).is_valid for uid in uids):
                raise Unreadable("the PACS answers with an invalid UID")
            found[uids[-1]] = uids
        if len(page) < PAGE and before + len(page) == len(found):
            return list(found.values())
        if len(found) == before or len(found) > MOST_FRAMES:
            raise Unreadable("the PACS answers a search without end")


def _fetched(client: Any, uids: list[str], path: Path) -> dict[str, Any] | None:
    """The facts of an instance, of which ``path`` gets the pixels; None of one without pixels, as `dicom.facts`.

    ``{"unreadable": reason}`` of pixels that cannot be decoded.
    """
    whole = client.retrieve_instance(*uids, media_types=(("application/dicom", "*"),))
    if [str(whole.get(name, "")) for name in _UIDS] != uids:
        raise Unreadable("the PACS answers with another image than the one that was asked for")
    try:
        told = dicom.facts_of(whole, MOST_BYTES)
        kept = None if told is None else stripped(whole, MOST_BYTES)
    except Unreadable as error:
        return {"unreadable": str(error)}
    if kept is not None:
        _write(path, kept)
    return told


def _write(path: Path, content: bytes) -> None:
    try:
        write_whole(path, content, mode=0o600)
    except OSError as error:
        raise Unreadable(f"the index folder cannot be written: {why(error)}") from None
