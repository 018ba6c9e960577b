"""Versions that a bucket keeps of removed objects. The library for objects knows none: these requests are our own."""

from __future__ import annotations

import hashlib
import hmac
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode, urlsplit
from xml.etree import ElementTree

if TYPE_CHECKING:
    from obstore.store import S3Store

VALID = timedelta(minutes=5)
SECONDS = 30.0


class NoVersions(Exception):
    """The store does not tell its versions, or its credentials cannot sign for them; the text says which."""


def purge(store: S3Store, prefix: str) -> int:
    """Remove all versions of objects below ``prefix`` that are removed; how many there were.

    Raises:
        NoVersions: they cannot be listed, or one cannot be removed.
    """
    found = list(_versions(store, prefix))
    current = {key for key, _, is_current in found if is_current}
    gone = [(key, version) for key, version, _ in found if key not in current]
    for key, version in gone:
        _ask(store, "DELETE", lambda path, key=key: _path_of(path, store) + quote(key), versionId=version)
    return len(gone)


def _versions(store: S3Store, prefix: str) -> Iterator[tuple[str, str, bool]]:
    """Key and id of each version, and whether it is the object's present content."""
    whole = "/".join(part for part in (store.prefix, prefix) if part)
    after: dict[str, str] = {}
    while True:
        answer = _ask(store, "GET", lambda path: _path_of(path, store), versions="", prefix=whole, **after)
        try:
            root = ElementTree.fromstring(answer)  # noqa: S314 (of the operator's own store)
        except ElementTree.ParseError:
            raise NoVersions("the object store's list of versions cannot be read") from None
        texts = {element.tag.rpartition("}")[2]: element.text or "" for element in root}
        for element in root:
            kind = element.tag.rpartition("}")[2]
            if kind in ("Version", "DeleteMarker"):
                told = {each.tag.rpartition("}")[2]: each.text or "" for each in element}
                is_current = kind == "Version" and told.get("IsLatest") == "true"
                yield told["Key"], told["VersionId"], is_current
        if texts.get("IsTruncated") != "true":
            return
        after = {"key-marker": texts["NextKeyMarker"], "version-id-marker": texts["NextVersionIdMarker"]}


def _path_of(path: str, store: S3Store) -> str:
    """The bucket's own path, of the path of the object `_PROBE`."""
    whole = "/".join(part for part in (store.prefix, _PROBE) if part)
    return path.removesuffix(quote(whole))


_PROBE = "versions"


def _ask(store: S3Store, method: str, path_of: Callable[[str], str], **query: str) -> bytes:
    request = urllib.request.Request(signed(store, method, path_of, query), method=method)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
            return bytes(answer.read())
    except (urllib.error.URLError, OSError) as error:
        raise NoVersions(f"the object store does not tell its versions: {error}") from None


def signed(store: S3Store, method: str, path_of: Callable[[str], str], query: dict[str, str]) -> str:
    """A URL for one request, signed as AWS's Signature Version 4 says; endpoint and scope as the library signs.

    Raises:
        NoVersions: the credentials are not those of the environment.
    """
    from obstore import sign

    secret = os.environ.get("AWS_SECRET_ACCESS_KEY")
    if secret is None:
        raise NoVersions("the object store's credentials are a role's: give a key to have versions removed")
    given = urlsplit(sign(store, method, _PROBE, VALID))  # type: ignore[arg-type]
    parameters = dict(parse_qsl(given.query)) | query
    del parameters["X-Amz-Signature"]
    path, text = path_of(given.path), urlencode(sorted(parameters.items()), quote_via=quote, safe="-_.~")
    canonical = "\n".join([method, path, text, f"host:{given.netloc}\n", "host", "UNSIGNED-PAYLOAD"])
    _, _, scope = parameters["X-Amz-Credential"].partition("/")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = "\n".join(["AWS4-HMAC-SHA256", parameters["X-Amz-Date"], scope, digest])
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    return f"{given.scheme}://{given.netloc}{path}?{text}&X-Amz-Signature={signature}"
