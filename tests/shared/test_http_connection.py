"""What is taken for HTTP: nothing that h11, which read requests before, refuses, and nothing of two meanings."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.http_wire import by_h11, converse

HOST = b"Host: a\r\n"
LONG = b"x" * (20 << 10)


def get(target: bytes = b"/x", headers: bytes = HOST, version: bytes = b"HTTP/1.1", verb: bytes = b"GET") -> bytes:
    return verb + b" " + target + b" " + version + b"\r\n" + headers + b"\r\n"


def post(headers: bytes, body: bytes, version: bytes = b"HTTP/1.1") -> bytes:
    return get(headers=HOST + headers, version=version, verb=b"POST") + body


def chunked(body: bytes, coding: bytes = b"Transfer-Encoding: chunked\r\n", version: bytes = b"HTTP/1.1") -> bytes:
    return post(coding, body, version)


CHUNKS = b"3\r\nabc\r\n0\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"

TAKEN = {
    "a request": get(),
    "a query with everything": get(b"/x?a?b=%20&c/[]"),
    "two slashes are no host": get(b"//b/x"),
    "a verb of others": get(verb=b"SOURCE"),
    "HTTP/1.0": get(headers=b"", version=b"HTTP/1.0"),
    "HTTP/1.0 with a host": get(version=b"HTTP/1.0"),
    "many headers": get(headers=HOST + b"A: b\r\n" * 2000),
    "bytes in a header's value": get(headers=HOST + b"A: b\xff\xc3c\r\n"),
    "an empty value": get(headers=HOST + b"A:\r\n"),
    "a length": post(b"Content-Length: 3\r\n", b"abc"),
    "a length with a space behind it": post(b"Content-Length: 3 \r\n", b"abc"),
    "chunks": chunked(CHUNKS),
    "an extension of a chunk": chunked(b"3;a=b\r\nabc\r\n0\r\n\r\n"),
    "a trailer": chunked(b"3\r\nabc\r\n0\r\nX: y\r\n\r\n"),
    "three requests at once": get() + get(b"/y") + get(b"/z"),
    "bodies at once": post(b"Content-Length: 3\r\n", b"abc") * 2 + get(),
}
REFUSED = {
    "an empty line first": b"\r\n" + get(),
    "a space first": b" " + get(),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "no version": b"GET /x\r\n\r\n",
    "no host": get(headers=b""),
    "two hosts": get(headers=HOST * 2),
    "no ASCII in the path": get(b"/\xc3\xa9"),
    "no ASCII in the query": get(b"/x?\xc3\xa9"),
    "a control character in the target": get(b"/x?\x7f"),
    "NUL in the target": get(b"/x\x00"),
    "a space in the target": get(b"/x y"),
    "NUL in a value": get(headers=HOST + b"A: b\x00c\r\n"),
    "CR in a value": get(headers=HOST + b"A: b\rc\r\n"),
    "NUL in an upgrade": get(headers=HOST + b"Upgrade: h2c\x00\r\n"),
    "a space behind an upgrade's name": get(headers=HOST + b"Upgrade : h2c\r\n"),
    "a space behind a name": get(headers=HOST + b"A : b\r\n"),
    "a bracket in a name": get(headers=HOST + b"A(b: c\r\n"),
    "no name": get(headers=HOST + b": b\r\n"),
    "no colon": get(headers=HOST + b"Abc\r\n"),
    "a head without end": get(headers=HOST + b"A: " + LONG)[:-4],
    "a target without end": b"GET /" + LONG,
    "two lengths": post(b"Content-Length: 3\r\nContent-Length: 4\r\n", b"abc"),
    "a signed length": post(b"Content-Length: +3\r\n", b"abc"),
    "a negative length": post(b"Content-Length: -3\r\n", b"abc"),
    "a length in hex": post(b"Content-Length: 0x3\r\n", b"abc"),
    "no length behind the name": post(b"Content-Length: \r\n", b""),
    "lengths apart": post(b"Content-Length: 1 2\r\n", b"abc"),
    "a length that nothing has": post(b"Content-Length: 99999999999999999999999\r\n", b"abc"),
    "a coding before chunks": chunked(CHUNKS, b"Transfer-Encoding: gzip, chunked\r\n"),
    "another coding": chunked(b"abc", b"Transfer-Encoding: gzip\r\n"),
    "no coding": chunked(CHUNKS, b"Transfer-Encoding: identity\r\n"),
    "an empty coding": chunked(CHUNKS, b"Transfer-Encoding:\r\n"),
    "two codings": chunked(CHUNKS, CHUNKED * 2),
    "a coding with a control character": chunked(CHUNKS, b"Transfer-Encoding: \x0bchunked\r\n"),
    "a chunk's size that is none": chunked(b"zz\r\nabc\r\n0\r\n\r\n"),
    "a chunk's size with 0x": chunked(b"0x3\r\nabc\r\n0\r\n\r\n"),
    "a chunk longer than its size": chunked(b"3\r\nabcd\r\n0\r\n\r\n"),
    "an extension without end": chunked(b"3;a=" + LONG),
    "two spaces": get(b" /x"),
    "rubbish behind a request": get() + b"rubbish\r\n\r\n",
}
STRICTER = {  # h11 takes these
    "bare newlines": get().replace(b"\r\n", b"\n"),
    "HTTP/2.0": get(version=b"HTTP/2.0"),
    "HTTP/1.2": get(version=b"HTTP/1.2"),
    "HTTP/0.9": get(version=b"HTTP/0.9"),
    "a verb that nobody knows": get(verb=b"FOO"),
    "a verb in small letters": get(verb=b"get"),
    "a tunnel": get(b"a:80", verb=b"CONNECT"),
    "a tunnel to a path": get(verb=b"CONNECT"),
    "a whole address": get(b"http://a/x"),
    "a star": get(b"*", verb=b"OPTIONS"),
    "a fragment": get(b"/x#y"),
    "a folded header": get(headers=HOST + b"A: b\r\n c\r\n"),
    "a folded upgrade": get(headers=HOST + b"Connection: upgrade\r\nUpgrade: a\r\n b\r\n"),
    "a control character in a value": get(headers=HOST + b"A: b\x01c\r\n"),
    "a whole head that is too long": get(headers=HOST + b"A: " + LONG + b"\r\n"),
    "a whole target that is too long": get(b"/" + LONG),
    "the same length twice": post(b"Content-Length: 3\r\nContent-Length: 3\r\n", b"abc"),
    "a list of lengths": post(b"Content-Length: 3, 3\r\n", b"abc"),
    "chunks and a length": chunked(CHUNKS, b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n"),
    "a length and chunks": chunked(CHUNKS, b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n"),
    "chunks in HTTP/1.0": chunked(CHUNKS, version=b"HTTP/1.0"),
    "a space behind a chunk's size": chunked(b"3 \r\nabc\r\n0\r\n\r\n"),
}


@pytest.mark.parametrize("what", TAKEN)
@pytest.mark.parametrize("trickled", [False, True])
def test_what_h11_takes_is_taken_as_the_same(what: str, trickled: bool) -> None:
    data = TAKEN[what]
    found = converse(*([bytes([byte]) for byte in data] if trickled else [data]))
    assert found.requests == by_h11(data).requests
    assert found.statuses == [200] * len(found.requests) != []


@pytest.mark.parametrize("what", REFUSED)
def test_what_h11_refuses_is_refused(what: str) -> None:
    assert by_h11(REFUSED[what]).refused, "the table is wrong"
    found = converse(REFUSED[what])
    assert found.refused
    assert found.statuses[:-1] == [200] * len(found.requests), "the answers come in the order of the requests"
    assert len(found.requests) == (1 if what == "rubbish behind a request" else 0)


@pytest.mark.parametrize("what", STRICTER)
def test_what_two_servers_could_read_in_two_ways_is_refused_too(what: str) -> None:
    assert not by_h11(STRICTER[what]).refused, "the table is wrong"
    found = converse(STRICTER[what])
    assert found.refused
    assert found.requests == []


def test_a_body_is_no_request_whatever_protocol_is_asked_for() -> None:
    inner = get(b"/smuggled")
    asking = b"Connection: Upgrade\r\nuPGRADE: h2c\r\n"
    found = converse(post(asking + b"Content-Length: %d\r\n" % len(inner), inner) + get(b"/next"))
    assert [(request.target, request.body) for request in found.requests] == [("/x", inner), ("/next", b"")]
    found = converse(get(headers=HOST + asking.replace(b"h2c", b"websocket")))
    assert found.statuses == [200]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_what_comes_behind_the_end_of_chunks_is_answered_however_it_is_cut(size: int) -> None:
    data = (chunked(CHUNKS) + chunked(b"3;x\r\na\nb\r\n000\r\nX: y\r\n\r\n") + get(b"/y")) * 2
    found = converse(*(data[at : at + size] for at in range(0, len(data), size)))
    assert [request.target for request in found.requests] == ["/x", "/x", "/y"] * 2
    assert [request.body for request in found.requests] == [b"abc", b"a\nb", b""] * 2
    assert found.requests == by_h11(data).requests


def test_a_body_whose_request_is_answered_early_is_read_to_its_end_and_no_further() -> None:
    early = chunked(CHUNKS).replace(b"/x", b"/early")
    found = converse(early[:-7], early[-7:] + get(b"/y"))
    assert [request.target for request in found.requests] == ["/early", "/y"]
    assert found.statuses == [200, 200]


def test_a_coding_may_be_written_in_capitals() -> None:
    [request] = converse(chunked(CHUNKS, CHUNKED.replace(b"c", b"C"))).requests
    assert request.body == b"abc"


def test_trailers_are_not_kept_for_ever() -> None:
    pieces = [b"X: " + b"y" * 1000 + b"\r\n"] * 40
    found = converse(chunked(b"3\r\nabc\r\n0\r\n"), *pieces)
    assert found.refused
    found = converse(chunked(b"3\r\nabc\r\n0\r\n" + b"X: y\r\n" * 5000 + b"\r\n"))
    assert found.refused
    found = converse(chunked(b"3\r\nabc\r\n0\r\nX: "), *[b"y" * 1000] * 40)
    assert found.refused


def test_an_answer_of_no_known_length_to_http_1_0_ends_with_the_connection() -> None:
    found = converse(get(version=b"HTTP/1.0"))
    head, _, body = found.written.partition(b"\r\n\r\n")
    assert (body, found.ended) == (b"good", True)
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    head, _, body = converse(get()).written.partition(b"\r\n\r\n")
    assert body == b"4\r\ngood\r\n0\r\n\r\n"
    assert b"transfer-encoding: chunked" in head


def test_the_head_of_an_answer_goes_out_with_its_body() -> None:
    found = converse(get() + get(b"/y"))
    assert [written[:15] for written in found.writes] == [b"HTTP/1.1 200 OK"] * 2
    assert all(written.endswith(b"0\r\n\r\n") for written in found.writes)
    assert b"".join(found.writes) == found.written


def test_a_head_whose_body_is_long_in_coming_does_not_wait_for_it() -> None:
    found = converse(get(b"/later") + get(b"/y"))
    first, second, third = found.writes
    assert first.startswith(b"HTTP/1.1 200 OK")
    assert first.endswith(b"\r\n\r\n")
    assert (second, found.statuses) == (b"4\r\ngood\r\n0\r\n\r\n", [200, 200])
    assert third.startswith(b"HTTP/1.1 200 OK")


def test_an_answer_without_a_body_and_one_to_a_client_that_waits_to_be_asked_are_whole() -> None:
    found = converse(get(verb=b"HEAD") + get(b"/y"))
    assert found.statuses == [200, 200]
    found = converse(post(b"Expect: 100-continue\r\nContent-Length: 3\r\n", b""), b"abc")
    assert found.statuses == [100, 200]
    assert [request.body for request in found.requests] == [b"abc"]
    found = converse(get(version=b"HTTP/1.0", verb=b"HEAD", headers=HOST))
    assert (found.statuses, found.ended) == ([200], True)


def test_the_end_of_a_connection_reaches_the_request_under_way_though_more_was_asked() -> None:
    found = converse(post(b"Content-Length: 9\r\n", b"abc"))
    assert (found.requests, found.statuses) == ([], []), "and the application has come to its end"


LINES = st.sampled_from(
    [
        *(b"Host: a", b"Host: b", b"Content-Length: 5", b"Content-Length: 0", b"Content-Length: 05"),
        *(b"Content-Length:5,5", b"Content-Length : 5", b"Content_Length: 5", b"Transfer-Encoding: chunked"),
        *(b"Transfer-Encoding: identity", b"Transfer-Encoding:\tchunked", b"transfer-encoding: chunked, chunked"),
        *(b"Connection: close", b"Connection: upgrade", b"Upgrade: websocket", b"Upgrade: h2c"),
        *(b"Expect: 100-continue", b"A: b", b"A:", b" folded", b"Trailer: A"),
    ]
)
STARTS = st.sampled_from(
    [b"GET /x HTTP/1.1", b"POST /x HTTP/1.1", b"PUT /x?y HTTP/1.0", b"CONNECT /x HTTP/1.1", b"GET  /x HTTP/1.1"]
)
BODIES = st.sampled_from(
    [
        b"",
        b"abcde",
        b"5\r\nabcde\r\n0\r\n\r\n",
        b"5;x\r\nabcde\r\n0\r\nA: b\r\n\r\n",
        b"GET /y HTTP/1.1\r\nHost: a\r\n\r\n",
    ]
)
ENDS = st.sampled_from([b"\r\n"] * 30 + [b"\n", b"\r", b"\r\n\r\n"])


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Some messages on one connection, some of which are not quite right."""
    data = b""
    for _ in range(draw(st.integers(1, 3))):
        lines = [draw(STARTS), *([b"Host: a"] if draw(st.integers(0, 5)) else []), *draw(st.lists(LINES, max_size=4))]
        data += b"".join(line + draw(ENDS) for line in lines) + b"\r\n" + draw(BODIES)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        at = draw(st.integers(0, len(data) - 1))
        data = data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + draw(st.integers(0, 1)) :]
    return data


@given(data=messages(), cuts=st.lists(st.integers(1, 200), max_size=5))
@settings(deadline=None, max_examples=300)
def test_no_request_is_seen_that_h11_would_not_see(data: bytes, cuts: list[int]) -> None:
    pieces, rest = [], data
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    found = converse(*(piece for piece in [*pieces, rest] if piece))
    wanted = by_h11(data).requests
    for ours, theirs in zip(found.requests, wanted, strict=False):
        for request in (ours, theirs):  # A wish for another protocol is mostly not passed on.
            request.headers = [pair for pair in request.headers if pair[0] != b"upgrade"]
        assert ours == theirs
    assert len(found.requests) <= len(wanted)
