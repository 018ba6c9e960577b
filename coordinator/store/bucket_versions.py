"""Versions that a bucket keeps of removed objects. The library for objects knows none: these requests are our own."""

from __future__ import annotations

import hashlib
import hmac
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode, urlsplit
from xml.etree import ElementTree

if TYPE_CHECKING:
    from obstore.store import S3Store

VALID = timedelta(minutes=5)
SECONDS = 30.0
PROBE = "versions"  # a path for which the library signs, to learn endpoint and scope


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
        _ask(store, "DELETE", key, versionId=version)
    return len(gone)


def _versions(store: S3Store, prefix: str) -> Iterator[tuple[str, str, bool]]:
    """Key and id of each version, and whether it is the object's present content."""
    whole = "/".join(part for part in (store.prefix, prefix) if part)
    after: dict[str, str] = {}
    while True:
        answer = _ask(store, "GET", "", versions="", prefix=whole, **after)
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


def _ask(store: S3Store, method: str, key: str, **query: str) -> bytes:
    request = urllib.request.Request(signed(store, method, key, query), method=method)  # noqa: S310
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:  # noqa: S310
            return bytes(answer.read())
    except (urllib.error.URLError, OSError) as error:
        raise NoVersions(f"the object store does not tell its versions: {error}") from None


def signed(store: S3Store, method: str, key: str, query: dict[str, str]) -> str:
    """A URL for a request to ``key`` (empty: to the bucket), signed by AWS's Signature Version 4.

    Endpoint and scope are those with which the library signs.

    Raises:
        NoVersions: the credentials are not those of the environment.
    """
    from obstore import sign

    secret = os.environ.get("AWS_SECRET_ACCESS_KEY")
    if secret is None:
        raise NoVersions("the object store's credentials are a role's: give a key to have versions removed")
    given, probe = urlsplit(sign(store, "GET", PROBE, VALID)), "/".join(filter(None, (store.prefix, PROBE)))
    path = given.path.removesuffix(quote(probe)) + quote(key)
    parameters = dict(parse_qsl(given.query)) | query
    del parameters["X-Amz-Signature"]
    text = urlencode(sorted(parameters.items()), quote_via=quote, safe="-_.~")
    canonical = "\n".join([method, path, text, f"host:{given.netloc}\n", "host", "UNSIGNED-PAYLOAD"])
    _, _, scope = parameters["X-Amz-Credential"].partition("/")
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    to_sign = "\n".join(["AWS4-HMAC-SHA256", parameters["X-Amz-Date"], scope, digest])
    secret_key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        secret_key = hmac.digest(secret_key, part.encode(), "sha256")
    signature = hmac.digest(secret_key, to_sign.encode(), "sha256").hex()
    return f"{given.scheme}://{given.netloc}{path}?{text}&X-Amz-Signature={signature}"
