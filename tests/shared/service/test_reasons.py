"""Errors of pydantic, of libraries and of the system in words."""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import sqlite3
import ssl
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from promptfed.shared.service.reasons import (
    NAME_PATTERN,
    NESTED,
    NOT_TEXT,
    collect_seldom,
    first_error,
    named,
    of_surroundings,
    why,
)


class Inner(BaseModel):
    size: int = 1


class Model(BaseModel, extra="forbid"):
    name: Annotated[str, Field(pattern=NAME_PATTERN)] = "a"
    code: Annotated[str, Field(pattern="^x$")] = "x"
    text: Annotated[str, Field(min_length=1)] = "a"
    pair: Annotated[str, Field(min_length=2)] = "ab"
    share: Annotated[float, Field(gt=0, le=1)] = 0.5
    inner: Inner = Inner()
    even: int = 0

    @field_validator("even")
    @classmethod
    def _check(cls, even: int) -> int:
        if even % 2:
            raise ValueError("must be even")
        return even


NAME = "name: use letters, digits and . _ - without spaces, at most 64, and begin with a letter or digit"


@pytest.mark.parametrize(("given", "words"), [
    ({"name": "a b"}, NAME), ({"code": "y"}, "code: must match pattern '^x$'"),
    ({"text": ""}, "text: must not be empty"), ({"pair": "a"}, "pair: must have at least 2 characters"),
    ({"other": 1}, "other: is not known here; check its spelling"),
    ({"inner": 3}, "inner: must be a mapping, such as {key: value}"),
    ({"inner": {"size": "x"}}, "inner.size: must be a valid integer"), ({"share": 0}, "share: must be greater than 0"),
    ({"even": 1}, "even: must be even"), ([], "(body): must be a mapping, such as {key: value}"),
])  # fmt: skip
def test_an_error_says_where_and_what(given: object, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Model.model_validate(given)
    assert first_error(caught.value) == words


def test_what_is_missing_is_named() -> None:
    class Needy(BaseModel):
        name: str

    with pytest.raises(ValidationError) as caught:
        Needy.model_validate({})
    assert first_error(caught.value) == "name: is missing"


def raised(error: BaseException, cause: BaseException | None = None, hidden: bool = False) -> BaseException:
    """``error`` as it is caught where ``cause`` led to it, or is hidden by ``from None``."""
    try:
        try:
            raise cause or ValueError
        except BaseException:
            if hidden:
                raise error from None
            raise error  # noqa: B904 (the context is what is looked at)
    except BaseException as caught:
        return caught


class ProxyError(Exception):
    """As of httpx."""


class ReadTimeout(Exception):
    """As of httpx."""


def tls(kind: type[ssl.SSLError], **attributes: Any) -> ssl.SSLError:
    error = kind("[SSL: X] no (_ssl.c:1)")
    vars(error).update({name: value for name, value in attributes.items() if name != "reason"})
    error.reason = attributes.get("reason", "")
    return error


NO_TMP = "no temporary folder can be written; free some space, or set TMPDIR to another"
DENIED = "permission denied; change its permissions, or run as its owner"
REFUSED = ExceptionGroup("all", [ConnectionRefusedError(errno.ECONNREFUSED, "x"), ValueError("y")])
UNWRITABLE = UnicodeEncodeError("latin-1", "a\u2603b", 1, 2, "x")
FULL, TEMPORARY = os.strerror(errno.ENOSPC), "No usable temporary directory found in ['/tmp']"


@pytest.mark.parametrize(("error", "words"), [
    (json.JSONDecodeError("x", "a\nb", 2), "line 2 is not JSON"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), NOT_TEXT),
    (tls(ssl.SSLCertVerificationError, verify_message="self-signed"), "self-signed"),
    (tls(ssl.SSLError, reason="WRONG_VERSION_NUMBER"), "wrong version number"),
    (tls(ssl.SSLError), "it holds no PEM certificate and key; give one that does"),
    (socket.gaierror(-2, "x"), "no host has this name"),
    (OSError(errno.ENOSPC, FULL), "the disk is full; free some space, or give another place"),
    (OSError(errno.ENOSPC, "12 bytes are missing"), "12 bytes are missing"),
    (OSError(errno.ENOSPC, None), "the disk is full; free some space, or give another place"),
    (OSError(errno.ENOENT, TEMPORARY), NO_TMP), (OSError(errno.EDOM, "x"), os.strerror(errno.EDOM).lower()),
    (OSError("our own"), "our own"), (ProxyError("407 Login"), "the proxy answers 407 Login"),
    (ReadTimeout(""), "no answer in time"), (ReadTimeout("late"), "late"), (ValueError(""), "the connection was cut"),
    (ValueError("[SSL: X] a \n b (_ssl.c:1)"), "a b"), (REFUSED, "nothing listens there; check the address"),
    (ValueError("outer", PermissionError(errno.EACCES, "x")), DENIED),
    (raised(ValueError("outer"), OSError(errno.EISDIR, "x")), "it is a folder; name a file"),
    (raised(ValueError("outer"), OSError(errno.EISDIR, "x"), hidden=True), "outer"),
])  # fmt: skip
def test_an_error_has_a_reason_in_words(error: BaseException, words: str) -> None:
    assert why(error) == words


@pytest.mark.parametrize(("error", "words"), [
    (OSError(errno.EISDIR, "x", "/a"), "/a cannot be used: it is a folder; name a file"),
    (ExceptionGroup("all", [OSError(errno.EISDIR, "x"), ValueError()]), "it is a folder; name a file"),
    (UNWRITABLE, "'\\u2603' cannot be written in latin-1: set PYTHONIOENCODING"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "x"), NOT_TEXT), (RecursionError(), NESTED),
    (sqlite3.OperationalError("database or disk is full"), "the database cannot be used: the disk is full; free"),
    (sqlite3.OperationalError("no such\n table"), "the database cannot be used: no such table"),
    (ValueError("x"), None),
])  # fmt: skip
def test_errors_of_the_surroundings_are_one_line(error: BaseException, words: str | None) -> None:
    said = of_surroundings(error)
    assert (said is None) if words is None else (said or "").startswith(words)


def test_a_database_s_own_words_are_told_without_the_statement() -> None:
    class Wrapped(Exception):
        """As a database's library has them."""

    Wrapped.__module__ = "sqlalchemy.exc"
    wrapped: Any = Wrapped("database is locked [SQL: SELECT secret]")
    wrapped.orig = sqlite3.OperationalError("database  is\nlocked")
    assert of_surroundings(wrapped) == "the database cannot be used: database is locked"
    wrapped.orig = None
    assert of_surroundings(wrapped) == "the database cannot be used: database is locked [SQL: SELECT secret]"


def test_a_process_of_ours_collects_seldom() -> None:
    before = gc.get_threshold()
    try:
        collect_seldom()
        assert gc.get_threshold()[0] == 10_000
    finally:
        gc.set_threshold(*before)


def test_a_file_is_named_where_there_is_one() -> None:
    assert named(OSError(errno.EISDIR, "x")) == "it is a folder; name a file"
