"""A split's images and their scale, words for a domain, and who reads images apart."""

from __future__ import annotations

import errno
import io
import json
import os
import select
import signal
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, Mock

import pytest
import torch
from PIL import Image

from promptfed.shared import data
from promptfed.shared.data import DataError, readers, worker
from promptfed.shared.data.identity import DataIdentity
from promptfed.shared.data.pixels import GREY
from promptfed.shared.data.readers import Answer, Readers, Request
from promptfed.shared.data.registry import SharedSources, check_filled, parse_uri, tell_look_alikes
from promptfed.shared.data.schemes import all_drawn
from promptfed.shared.data.source import Source, Split, in_words, joined, one_scale, refuse_special_files


@pytest.mark.parametrize(("count", "more"), [(1, False), (3, False), (4, True), (6, True)])
def test_special_files_of_a_folder_are_named(tmp_path: Path, count: int, more: bool) -> None:
    refuse_special_files(tmp_path / "none", "x:")
    (tmp_path / "file").touch()
    refuse_special_files(tmp_path, "x:")
    for number in range(count):
        os.mkfifo(tmp_path / f"{number}")
    with pytest.raises(DataError) as caught:
        refuse_special_files(tmp_path, "x:")
    names = ", ".join(str(tmp_path / f"{number}") for number in range(min(count, 3)))
    assert f"x:: {names}{f' and {count - 3} more' if more else ''}: a pipe" in str(caught.value)


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "sub"))
    monkeypatch.setattr("promptfed.shared.data.source.special_files", Mock(side_effect=closed))
    with pytest.raises(DataError, match=r"x:: .*/sub cannot be listed \(.*\); make it readable"):
        refuse_special_files(tmp_path, "x:")


@pytest.mark.parametrize(
    ("text", "words"),
    [("a  sketch of\na {}", "a sketch of a {}"), ("ink", "a {}, ink"), (" ", None), ("{} and {}", None)],
)
def test_words_for_a_domain_have_one_place(text: str, words: str | None) -> None:
    if words is None:
        with pytest.raises(DataError, match="must"):
            in_words(text)
    else:
        assert in_words(text) == words


def split(*shades: int, groups: str | None = None, scale: Any = None, **options: Any) -> Split:
    def read(row: int) -> Image.Image:
        image = Image.new("RGB", (2, 2), (shades[row],) * 3)
        image.info = {} if scale is None else {GREY: scale}
        return image

    return Split(torch.zeros(len(shades)), read, None if groups is None else list(groups), **options)


def test_an_image_of_another_scale_or_content_is_refused() -> None:
    with pytest.raises(ValueError, match="2 groups for 1 labels"):
        split(1, groups="ab")
    one = split(1, scale=(0, 4095))
    with pytest.raises(DataError, match=r"image 0 is a grey picture that is read as 12 bits, .* as in grey=12"):
        one.image(0)
    one.grey = (0, 4095)
    assert one.image(0).size == (2, 2)
    assert (one.scales([0]), one.scale(0), one.path(0)) == ([(0, 4095)], (0, 4095), None)
    changed = split(1, digest=lambda row: "other", path=lambda row: Path("/a/b.png"))
    with pytest.raises(DataError, match=r"^/a/b\.png is not what it was when the data were opened"):
        changed.image(0)
    assert changed.digest(0) == "other"


def test_parts_are_joined_with_their_groups_and_digests() -> None:
    first, second = split(1, 2, groups="ab"), split(3, groups="c")
    whole = joined(first.select(torch.tensor([1, 0])), second)
    assert [whole.image(row).getpixel((0, 0))[0] for row in range(3)] == [2, 1, 3]
    assert [whole.digest(row) for row in range(3)] == [first.digest(1), first.digest(0), second.digest(0)]
    assert whole.groups == ("b", "a", "c")
    assert joined(first, split(3)).groups is None
    first.subgroups = dict.fromkeys("hgfedcba", ("x", "y"))
    second.subgroups = dict.fromkeys("bcdefghi", ("z",))
    assert list(joined(first, second).subgroups.items()) == [(column, ("x", "y", "z")) for column in "bcdefgh"]


@pytest.mark.parametrize(("scales", "given", "found"), [
    ([None, (0, 255), (0, 255)], None, (0, 255)), ([None], None, None),
    ([None], (12.0,), "grey= is for grey pictures of more than 8 bits, and there is none"),
    ([(0, 4095)], (12.0,), (0, 4095)), ([(0, 65535)], (16.0,), (0, 65535)),
    ([(0, 65535)], (17.0,), "grey=17 is no number of bits of whole numbers, which is 1 to 16"),
    ([(0, 1.5)], (1.5,), (0, 1.5)), ([(-1, 3)], (-1.0, 3.0), (-1, 3)),
    ([(0, 1)] * 2 + [(0, 2)], None, "2 files as 0 to 1, 1 as 0 to 2; say it"),
    ([(0, n) for n in range(2, 7)], None, "1 as 2 bits, 1 as 0 to 4, 1 as 0 to 5, 1 as 0 to 6; say it"),
    ([(0, n) for n in range(2, 8)], None, "1 as 0 to 6, and 1 further scale; say it"),
])  # fmt: skip
def test_grey_pictures_have_one_scale(scales: list[Any], given: Any, found: Any) -> None:
    if isinstance(found, str):
        with pytest.raises(DataError) as caught:
            one_scale(scales, "x:", given)
        assert found in str(caught.value)
    else:
        assert one_scale(scales, "x:", given) == found


def test_a_part_without_an_image_is_refused() -> None:
    for train, test, role, lacking in (
        (1, 0, "trainer", "test"), (0, 1, "trainer", "train"), (0, 1, "evaluator", ""), (1, 0, "evaluator", "test"),
    ):  # fmt: skip
        source = Source("x:", ("a",), None, "{}", split(*[1] * train), split(*[1] * test))
        if lacking:
            with pytest.raises(DataError, match=f"x:: no image is left in {lacking}"):
                check_filled(source, role)
        else:
            check_filled(source, role)
    with pytest.raises(AttributeError, match=r"module 'promptfed\.shared\.data' has no attribute 'nothing'"):
        data.nothing  # noqa: B018


@pytest.mark.parametrize(("written", "body"), [
    ("a%3Fb", "a?b"), ("a%3fb%3F", "a?b?"), ("a%253Fb", "a%3Fb"), ("a%252525253Fb", "a%2525253Fb"), ("5%25", "5%25"),
])  # fmt: skip
def test_a_question_mark_of_a_path_is_written_in_percent(written: str, body: str) -> None:
    assert parse_uri(f"folder:{written}?domain=x")[:2] == ("folder", body)


@pytest.mark.parametrize(("uris", "drawn"), [
    (["symbols:neon?topic=weather", "digits"], True), (["emoji:flat", "folder:/a"], False), (["x:"], False), ([], True),
])  # fmt: skip
def test_data_are_drawn_where_all_sources_are(uris: list[str], drawn: bool) -> None:
    assert all_drawn(uris) is drawn


def test_a_folder_without_a_scheme_is_told_its_own(tmp_path: Path) -> None:
    for address, meant in ((tmp_path, f"; write folder:{tmp_path} for folders of images."), ("nowhere:x", None)):
        with pytest.raises(DataError) as caught:
            parse_uri(str(address))
        assert str(caught.value).endswith(meant or "torchvision.")


def test_sources_are_shared_in_turn_and_apart_by_use(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("test", 2)):
        (tmp_path / part / "a").mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (2, 2), (number, count, 0)).save(tmp_path / part / "a" / f"{number}.png")
    shared, turn, uri = SharedSources(), MagicMock(), f"folder:{tmp_path}"
    shared._turn = turn
    counts = [len(shared.open(f"{uri}?test_on={which}", "evaluator").test) for which in ("all", "test", "all")]
    assert (counts, turn.__enter__.call_count) == ([5, 2, 5], 3)
    shared.add("own", cast(Any, None))
    assert (shared.open("own"), turn.__enter__.call_count) == (None, 5)
    (tmp_path / "t.csv").write_text("path,label,split\ntrain/a/0.png,a,train\n")
    for opened in (data.open_source, SharedSources().open):
        with pytest.raises(DataError, match="no image is left in test"):
            opened(f"csv:{tmp_path / 't.csv'}?test_on=test", "evaluator")


@pytest.mark.parametrize(("count", "shown"), [(1, 1), (5, 5), (6, 5)])
def test_names_that_end_in_a_space_are_told(caplog: pytest.LogCaptureFixture, count: int, shown: int) -> None:
    tell_look_alikes(f"x:{count}", tuple(f"{'abcdef'[k] * 4} " for k in range(count)))
    assert caplog.messages[0].count(" ',") + 1 == shown
    tell_look_alikes(f"y:{count}", ("a", "b"))
    assert len(caplog.messages) == 1


def test_what_changed_in_the_classes_is_told_in_part() -> None:
    def identity(names: str) -> DataIdentity:
        return DataIdentity(class_names=list(names), words=[], splits={})

    assert identity("abc").changes(identity("bca")) == "other classes (in another order)"
    assert identity("abc").changes(identity("ad")) == "other classes (-'b', -'c', +'d')"
    assert identity("abcdef").changes(identity("gh")) == f"other classes ({', '.join(f'-{n!r}' for n in 'abcdef')})"


# Children that read files


class Sent(io.BytesIO):
    """What was sent on, with a flush."""

    whole = b""

    def flush(self) -> None:
        self.whole = self.getvalue()


class Process:
    """As of a child: what it is sent, and what it answers."""

    def __init__(self, answers: bytes, ended: bool = False) -> None:
        self.stdin, self.stdout = Sent(), io.BufferedReader(io.BytesIO(answers))
        self.ended, self.killed, self.waited = ended, 0, 0

    def poll(self) -> int | None:
        return 1 if self.ended else None

    def kill(self) -> None:
        self.killed += 1

    def wait(self) -> None:
        self.waited += 1


FACTS, WHOLE = b'{"facts": {"frames": 2}}\n', b'{"mode": "L", "size": [2, 1], "bytes": 2}\nab'
LOST = "reading it ended the process that reads; it needs too much memory, or is damaged"


@pytest.mark.parametrize(("answers", "into", "error", "started"), [
    ([FACTS], None, None, 1), ([WHOLE], None, None, 1), ([b"", WHOLE], None, None, 2),
    ([WHOLE[:-1], WHOLE], None, None, 2), ([b"", b""], None, LOST, 2),
    ([b'{"error": "its words"}\n'], None, "its words", 1), ([b'{"bytes": 3}\nabc'], 3, None, 1),
    ([b'{"bytes": 3}\nabc'], 4, "3 bytes of pixels came where 4 were asked for", 1),
    ([b'{"error": "its words"}\n'], 4, "its words", 1),
])  # fmt: skip
def test_a_child_that_ends_is_asked_once_more(
    monkeypatch: pytest.MonkeyPatch, answers: list[bytes], into: int | None, error: str | None, started: int
) -> None:
    processes = [Process(answer) for answer in answers]
    begun: list[Process] = []

    def start(command: Any, **options: Any) -> Process:
        begun.append(processes[len(begun)])
        return begun[-1]

    monkeypatch.setattr(readers.subprocess, "Popen", start)
    child, place = readers._Child(), None if into is None else memoryview(bytearray(into))
    found = child.read(Request("facts", "x", 3, {"a": 1}), place)
    assert (found.error, len(begun)) == (error, started)
    assert processes[0].killed == (started == 2)
    assert {json.dumps(Request("facts", "x", 3, {"a": 1}).__dict__).encode() + b"\n"} == {p.stdin.whole for p in begun}
    if place is not None and error is None:
        assert bytes(place) == b"abc"
    if error is None and into is None:
        assert found.facts == {"frames": 2} or found.image.tobytes() == b"aaabbb"
    kept = child._process
    if kept is not None:
        assert child._running() is kept
        kept.ended = True
        with pytest.raises(IndexError):
            child._running()
        assert kept.stdin.closed
        assert kept.stdout.closed
    child.close()
    assert child._process is None
    assert all(one.waited == one.killed and one.stdin.closed and one.stdout.closed for one in begun), "none is left"


def test_a_child_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, cancelled = Process(b""), []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, give_up: Any) -> None:
            assert seconds == readers.SECONDS
            self.give_up = give_up

        def start(self) -> None:
            assert self.daemon
            self.give_up()
            assert slow.killed == 1, "it may still write, or wait"

        def cancel(self) -> None:
            cancelled.append(self)

    monkeypatch.setattr(readers.threading, "Timer", Timer)
    monkeypatch.setattr(readers.subprocess, "Popen", lambda command, **options: slow)
    assert readers._Child().read(Request("facts"), None).error == "reading it takes more than 60 s"
    assert slow.killed >= 1
    assert len(cancelled) == 1, "it would end a later request"


def test_few_files_are_read_ahead_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, most, pool = [0], [0], Readers(2)

    class Later(Future[Answer]):
        def result(self, timeout: float | None = None) -> Answer:
            under_way[0] -= 1
            return super().result(timeout)

    def submit(request: Request, into: Any = None) -> Later:
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        given = Later()
        given.set_result(Answer(request.path))
        return given

    monkeypatch.setattr(pool, "submit", submit)
    answers = pool.each(Request("facts", str(number)) for number in range(20))
    assert [answer.error for answer in answers] == [str(number) for number in range(20)]
    assert (most[0], under_way[0]) == (2 * readers.AHEAD, 0)
    pool.close()


def test_readers_that_are_closed_end_their_children_and_begin_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, given_up, closed = threading.Event(), threading.Event(), []

    class Child:
        def read(self, request: Request, into: Any) -> Answer:
            begun.set()
            given_up.wait(1)
            return Answer(request.path)

        def close(self) -> None:
            closed.append(self)

    monkeypatch.setattr(readers, "_Child", Child)
    pool = Readers(1)
    first, second = (pool.submit(Request("facts", name)) for name in "ab")
    second.add_done_callback(lambda waiting: given_up.set())
    assert begun.wait(5)
    pool.close()
    assert (first.result().error, second.cancelled(), len(closed)) == ("a", True, 1)


@pytest.mark.parametrize(("processors", "count"), [(3, 3), (64, 16)])
def test_a_process_has_readers_of_its_own(monkeypatch: pytest.MonkeyPatch, processors: int, count: int) -> None:
    """Of those of the process that it was forked from no thread is left."""
    known, at_end = {1: None}, []
    monkeypatch.setattr(readers, "_readers", known)
    monkeypatch.setattr(readers.machine, "processors", lambda: processors)
    monkeypatch.setattr(readers.atexit, "register", lambda *call: at_end.append(call))
    monkeypatch.setattr(readers, "Readers", lambda most: (most, readers._turn.locked()))
    assert readers.readers() == (count, True)
    monkeypatch.setattr(readers, "Readers", None)
    assert known == {os.getpid(): readers.readers()}
    assert at_end == [(readers._close, os.getpid())]


def test_a_child_answers_at_once_and_says_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library prints is dropped. Its memory is bounded before it reads."""
    asked, asks = os.pipe()
    told, tells = os.pipe()
    if not (pid := os.fork()):
        os.dup2(asked, 0)
        os.dup2(tells, 1)
        os.close(asks)
        monkeypatch.setattr(worker.machine, "limit_memory", lambda most: monkeypatch.setattr(worker, "MEMORY", -most))
        answer = lambda request: os.write(1, b"!") and ({**request, "m": worker.MEMORY}, [b"x"])  # noqa: E731
        monkeypatch.setattr(worker, "answer", answer)
        try:
            worker.main()
        finally:
            os._exit(0)
    os.close(asked)
    os.close(tells)
    try:
        with open(told, "rb", buffering=0) as answers:
            os.write(asks, b'{"n": 0}\n{"n": 1}\n')
            wanted = b"".join(b'{"n": %d, "m": -%d}\nx' % (number, 3 << 30) for number in range(2))
            found = b""
            while len(found) < len(wanted):
                assert select.select([answers], [], [], 5)[0]
                found += answers.read(100) or b"it has ended"
            assert found == wanted
            os.close(asks)
            assert answers.read() == b"", "it ends with its parent"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_what_a_child_did_not_take_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that is broken when it is written to, and when it is closed: another child is asked."""

    class Broken(io.BytesIO):
        def write(self, data: Any) -> int:
            raise BrokenPipeError

        def close(self) -> None:
            raise BrokenPipeError

    first, second = Process(b""), Process(FACTS)
    first.stdin = Broken()
    begun = iter((first, second))
    monkeypatch.setattr(readers.subprocess, "Popen", lambda command, **options: next(begun))
    assert readers._Child().read(Request("facts"), None).facts == {"frames": 2}
    closed: list[int] = []
    monkeypatch.setattr(
        readers, "_readers", {1: None, os.getpid(): type("R", (), {"close": lambda self: closed.append(1)})()}
    )
    for pid in (1, os.getpid(), os.getpid()):
        readers._close(pid)
    assert (closed, list(readers._readers)) == ([1], [1])


@pytest.mark.parametrize(
    ("train", "test", "known"), [((0, 9), None, (0, 9)), (None, (0, 7), (0, 7)), (None, None, None)]
)
def test_the_scale_is_that_of_the_part_that_has_grey_pictures(train: Any, test: Any, known: Any) -> None:
    parts = [cast(Any, SimpleNamespace(grey=scale)) for scale in (train, test)]
    assert Source("folder:x", ("a",), None, "{}", *parts).grey == known
