"""Where requests to an object store go, what its answers mean, and the copies of what came."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store import blobs as blobs_module
from promptfed.coordinator.store import bucket as buckets
from promptfed.coordinator.store.backend import CannotOpen
from promptfed.coordinator.store.blobs import Blobs, DamagedBlob, digest_of
from promptfed.coordinator.store.bucket import ENDPOINTS, Bucket, NoObject, ObjectCache, ObjectStoreAway

obstore = pytest.importorskip("obstore.store", reason="object stores: install promptfed[s3]")


@pytest.mark.parametrize("name", [None, *ENDPOINTS])
def test_the_endpoint_is_the_environment_s_or_amazon_s(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(obstore.S3Store, "from_url", lambda url, **options: asked.append((url, options["config"])))
    for known in ENDPOINTS:
        monkeypatch.setenv(known, "https://here.example" if known == name else "")
    Bucket("s3://bucket/prefix")
    config = {"endpoint": "https://here.example"} if name is not None else None
    assert asked == [("s3://bucket/prefix", config)] * 2


@pytest.mark.parametrize("url", ["s3://", "gs://bucket", "bucket", "s3://bucket?region=x", "s3://key:secret@bucket"])
def test_what_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="--store must be s3://BUCKET/PREFIX"):
        Settings(store=url)


class Objects:
    """An object store in memory: as obstore's stores, it refuses to give what is not there."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.away = False

    def put(self, key: str, content: bytes | Path) -> None:
        self._ask("put")
        self.held[key] = content if isinstance(content, bytes) else content.read_bytes()

    def get(self, key: str) -> Any:
        self._ask("get")
        if key not in self.held:
            raise FileNotFoundError(key)
        body = self.held[key]
        parts = [memoryview(body[:2]), memoryview(body[2:])]
        return SimpleNamespace(stream=lambda min_chunk_size: parts, bytes=lambda: body)

    def delete(self, keys: str | list[str]) -> None:
        self._ask("delete")
        for key in [keys] if isinstance(keys, str) else keys:
            self.held.pop(key, None)

    def list(self, prefix: str) -> Iterator[list[dict[str, Any]]]:
        self._ask("list")
        put = datetime.fromtimestamp(1000.0, UTC)
        yield [{"path": key, "last_modified": put} for key in self.held if key.startswith(prefix)]

    def _ask(self, what: str) -> None:
        if self.away:
            raise OSError("refused\n\nDebug source:\nlong")
        self.asked.append(what)


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Objects:
    """What every bucket holds."""
    held = Objects()
    monkeypatch.setattr(obstore.S3Store, "from_url", lambda url, **options: held)
    return held


def test_answers_are_bytes_or_one_line(objects: Objects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bucket = Bucket("s3://bucket/prefix")
    (tmp_path / "file").write_bytes(b"file")
    bucket.put("blobs/aa/1", b"bytes")
    bucket.put("blobs/aa/2", tmp_path / "file")
    assert [list(bucket.parts("blobs/aa/1")), bucket.read("blobs/aa/2")] == [[b"by", b"tes"], b"file"]
    assert bucket.name() is None
    bucket.give_name("me")
    assert bucket.name() == "me"
    assert list(bucket.blobs()) == [("blobs/aa/1", 1000.0), ("blobs/aa/2", 1000.0)]
    with pytest.raises(NoObject):
        bucket.read("blobs/aa/3")
    monkeypatch.setattr(buckets, "AT_ONCE", 2)
    objects.asked.clear()
    bucket.remove(f"blobs/aa/{number}" for number in range(5))
    assert (objects.asked, objects.held) == (["delete"] * 3, {"store.id": b"me\n"})
    bucket.remove([])
    objects.away = True
    for call in (lambda: bucket.read("x"), lambda: bucket.put("x", b""), lambda: bucket.probe(), lambda: bucket.name()):
        with pytest.raises(ObjectStoreAway) as told:
            call()
        assert str(told.value) == "the object store at s3://bucket/prefix does not answer: refused"


def test_a_probe_leaves_nothing_and_a_look_writes_nothing(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket("s3://bucket")
    bucket.probe(writes=False)  # there is no name yet: it has answered
    bucket.probe()
    assert (objects.asked, objects.held) == (["get", "put", "get", "delete"], {})
    monkeypatch.setattr(objects, "put", lambda key, content: None)
    with pytest.raises(ObjectStoreAway, match=r"does not have probe/.*, which was written"):
        bucket.probe()


@pytest.mark.parametrize(
    ("endpoint", "allowed", "plain"),
    [
        (None, "", False), ("http://127.0.0.1:9000", "", True), ("http://localhost", "", True),
        ("http://far.example", "", False), ("http://far.example", "true", True), (None, "1", True),
        ("http://far.example", "0", False), ("far.example", "", False),
    ],
)  # fmt: skip
def test_only_this_machine_is_asked_unencrypted(
    endpoint: str | None, allowed: str, plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", allowed)
    assert buckets._may_be_plain(endpoint) is plain


def test_a_missing_library_and_a_wrong_address_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import BaseError

    def refuse(url: str, **options: Any) -> None:
        raise BaseError("no such region")

    monkeypatch.setattr(obstore.S3Store, "from_url", refuse)
    with pytest.raises(CannotOpen, match="--store s3://b cannot be used: no such region"):
        Bucket("s3://b")
    monkeypatch.setitem(sys.modules, "obstore.exceptions", None)
    with pytest.raises(CannotOpen, match=r"an object store needs its library: install promptfed\[s3\]"):
        Bucket("s3://b")


def test_the_copies_stay_within_their_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ObjectCache(tmp_path / "cache", most=250)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "left").write_bytes(b"x")
    cache.open()

    def adopt(name: str, size: int = 100) -> None:
        (tmp_path / "new").write_bytes(bytes(size))
        assert cache.adopt(tmp_path / "new", name) == cache.path(name)

    def there() -> list[str]:
        return sorted(path.name for path in (tmp_path / "cache").iterdir())

    assert there() == []
    for number in range(5):
        adopt(str(number))
    now = time.time()
    for number in range(5):
        os.utime(cache.path(str(number)), (now - 50 + number, now - 50 + number))
    adopt("0", 150)
    os.utime(cache.path("0"), (now - 50, now - 50))
    assert (cache._bytes, there()) == (550, list("01234")), "those just given out stay"
    monkeypatch.setattr(time, "time", lambda: now - 50 + 60)
    adopt("5")
    assert (cache._bytes, there()) == (500, list("12345")), "the oldest one is in use no more"
    cache.touch("1")
    monkeypatch.setattr(time, "time", lambda: now + 30)
    adopt("6", 150)
    assert (cache._bytes, there()) == (350, ["1", "5", "6"]), "those used longest ago go first"
    monkeypatch.setattr(time, "time", lambda: now + 1000)
    adopt("7")
    assert (cache._bytes, there()) == (250, ["6", "7"]), "no more go than must"
    cache.forget(["6", "nothing"])
    assert (cache._bytes, there()) == (100, ["7"])


class Rows:
    """Keys of objects, as the database has them, that change after a first look."""

    def __init__(self, *keys: dict[str, str]):
        self.answers = list(keys)

    def keys(self, digests: list[str]) -> dict[str, str]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def read(self, digests: list[str]) -> dict[str, bytes]:
        return {}


WHOLE, DIGEST = b"whole", digest_of(b"whole")


@pytest.mark.parametrize(
    ("held", "answers", "why"),
    [
        ({"a": WHOLE}, ["a"], None),
        ({}, ["a"], "is missing"),
        ({"a": b"other"}, ["a"], f"has changed: its digest is {digest_of(b'other')} now"),
        ({"b": WHOLE}, ["a", "b"], None),
        ({"a": b"other", "b": WHOLE}, ["a", "b"], None),
        ({"a": b"other"}, ["a", "b"], "is missing"),
        ({"a": b"other", "b": b"more"}, ["a", "b"], f"has changed: its digest is {digest_of(b'more')} now"),
        ({}, ["a", None], "is missing"),
    ],
)
def test_an_object_is_given_out_whole_or_named(
    held: dict[str, bytes], answers: list[str | None], why: str | None, objects: Objects, tmp_path: Path
) -> None:
    rows: Any = Rows(*({DIGEST: key} if key is not None else {} for key in answers))
    blobs = Blobs(tmp_path, rows, Bucket("s3://bucket"))
    blobs.open()
    objects.held = held
    if why is None:
        assert blobs.read(DIGEST) == WHOLE
        assert hashlib.sha256((tmp_path / "cache" / DIGEST[7:]).read_bytes()).hexdigest() == DIGEST[7:]
        objects.held = {}
        assert blobs.read(DIGEST) == WHOLE, "of the copy"
        with pytest.raises(DamagedBlob, match="is missing"):
            Blobs(tmp_path, rows, blobs.bucket, copies=False).read(DIGEST)
        (tmp_path / "cache" / DIGEST[7:]).write_bytes(b"other")
        with pytest.raises(DamagedBlob, match="is missing"):
            blobs.read(DIGEST)
    else:
        with pytest.raises(DamagedBlob) as told:
            blobs.read(DIGEST)
        assert (told.value.digest, told.value.why) == (DIGEST, why)
    assert list(blobs.incoming.iterdir()) == [], "nothing half read is left"


def test_litter_is_what_no_row_names_for_long(
    objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects.held = {"blobs/aa/1": b"", "blobs/aa/2": b""}
    rows: Any = SimpleNamespace(all_keys=lambda: {"blobs/aa/2"})
    assert Blobs(tmp_path, rows).remove_litter() == 0
    blobs = Blobs(tmp_path, rows, Bucket("s3://bucket"))
    for now, left in ((1000.0 + blobs_module.LITTER_SECONDS, 2), (1000.5 + blobs_module.LITTER_SECONDS, 1)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert (blobs.remove_litter(), len(objects.held)) == (2 - left, left)
    objects.away = True
    blobs.remove_superseded(["blobs/aa/2"])  # the next start removes it
    objects.away = False
    blobs.remove_superseded(["blobs/aa/2"])
    assert objects.held == {}


def test_an_error_is_told_in_one_line() -> None:
    assert buckets._first_line(Exception("x" * 600)) == "x" * 500
    assert buckets._first_line(Exception("no such\nbucket\n\nDebug source: a page")) == "no such bucket"
