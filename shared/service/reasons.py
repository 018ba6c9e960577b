"""Errors of libraries and of the operating system in words for users; exit codes of the services."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import socket
import ssl
from collections.abc import Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

REASONS = {
    errno.ENOENT: "there is no such file or folder; check the path",
    errno.ENOTDIR: "a part of the path is no folder; check the path",
    errno.EISDIR: "it is a folder; name a file",
    errno.EEXIST: "there is a file of this name; give another",
    errno.EACCES: "permission denied; change its permissions, or run as its owner",
    errno.EPERM: "permission denied; change its permissions, or run as its owner",
    errno.EROFS: "its file system cannot be written; give another place",
    errno.ENOSPC: "the disk is full; free some space, or give another place",
    errno.EDQUOT: "the disk quota is used up; free some space, or give another place",
    errno.ELOOP: "symbolic links form a circle; check the path",
    errno.ENAMETOOLONG: "the name is too long; give a shorter one",
    errno.EADDRINUSE: "the address is in use; give another port",
    errno.EADDRNOTAVAIL: "this machine has no such address; give another",
    errno.ECONNREFUSED: "nothing listens there; check the address",
    errno.ECONNRESET: "the connection was cut",
    errno.EPIPE: "the connection was cut",
    errno.EHOSTUNREACH: "no route leads there",
    errno.ENETUNREACH: "no route leads there",
    errno.ETIMEDOUT: "no answer in time",
}
OF_YAML = {
    "'\\t'": "a tab cannot indent; use spaces",
    "<stream end>": "the file ends within a list, a mapping or a text in quotes",
    "end of stream": "the file ends within a list, a mapping or a text in quotes",
    "mapping values": "a colon is not allowed here; put a text with a colon in quotes",
    "expected ':'": "a colon is missing",
    "for the tag": "a tag is not allowed; write plain values",
    "undefined alias": "put a text that begins with * in quotes",
    "is given twice": "",
    "cannot be a value": "",
    "what the alias repeats": "",
}
"""What PyYAML's problems hold, and what is said; empty: the problem itself."""
NESTED = "it is nested too deeply; check which file it is"
NOT_TEXT = "it is not text in UTF-8; check which file it is"
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"  # no path: clients name folders and addresses by ids
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_SHOULD = re.compile(r"^[A-Z]\w* should ")
_PREFIX, _SUFFIX = re.compile(r"^\[[^\]]*\] "), re.compile(r" \(_ssl\.c:\d+\)$")

GARBAGE = 10_000  # new objects until the next collection


def why(error: BaseException) -> str:
    """The reason of an error as the end of a sentence: of one of the system, also wrapped, of YAML, or the text."""
    cause: BaseException | None = error
    while cause is not None:
        reason = _known(cause)
        if reason is not None:
            return reason
        cause = _behind(cause)
    text = _SUFFIX.sub("", _PREFIX.sub("", " ".join(str(error).split())))
    if type(error).__name__ == "ProxyError":  # of httpx, which is not imported for this
        return f"the proxy answers {text}"
    return text or "no answer in time" if "Timeout" in type(error).__name__ else text or "the connection was cut"


def named(error: OSError) -> str:
    """The reason, after the file's name if the error has one."""
    return f"{error.filename} cannot be used: {why(error)}" if error.filename else why(error)


def of_surroundings(error: BaseException) -> str | None:
    """One line on an error of the operating system, a database, an encoding or deep nesting; None of any other."""
    if isinstance(error, BaseExceptionGroup):
        return of_surroundings(error.exceptions[0])
    if isinstance(error, OSError):
        return named(error)
    if isinstance(error, UnicodeEncodeError):
        shown = ascii(error.object[error.start : error.end])
        return f"{shown[:100]} cannot be written in {error.encoding}: set PYTHONIOENCODING=utf-8, or give another name"
    if isinstance(error, UnicodeDecodeError):
        return NOT_TEXT
    if isinstance(error, RecursionError):
        return NESTED
    # By their modules: commands do not import a database's library for this.
    if any(kind.__module__.partition(".")[0] in ("sqlalchemy", "sqlite3", "psycopg") for kind in type(error).__mro__):
        text = " ".join(str(getattr(error, "orig", None) or error).split())
        full = REASONS[errno.ENOSPC] if "disk is full" in text else text
        return f"the database cannot be used: {full}"
    return None


def _behind(error: BaseException) -> BaseException | None:
    """What led to ``error``: the first of a group's (of all addresses of a host), or its cause."""
    if isinstance(error, BaseExceptionGroup):
        return error.exceptions[0]
    wrapped = next((argument for argument in error.args if isinstance(argument, BaseException)), None)
    return error.__cause__ or wrapped or (None if error.__suppress_context__ else error.__context__)


def _known(error: BaseException) -> str | None:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno} is not JSON"
    if isinstance(error, UnicodeDecodeError):
        return NOT_TEXT
    mark = getattr(error, "problem_mark", None)  # of YAML, which is not imported for this
    if mark is not None:
        problem = str(getattr(error, "problem", None))
        words_of_it = next(
            (words or problem for sign, words in OF_YAML.items() if sign in problem), "it cannot be understood"
        )
        return f"mend line {mark.line + 1}: {words_of_it}"
    if isinstance(error, ssl.SSLCertVerificationError):
        return str(getattr(error, "verify_message", error))  # which TLS sets, and no constructor
    if isinstance(error, ssl.SSLError):
        no_pem = "it holds no PEM certificate and key; give one that does"
        return error.reason.replace("_", " ").lower() if error.reason else no_pem
    if isinstance(error, socket.gaierror):
        return "no host has this name"
    if isinstance(error, OSError) and error.errno is not None:
        usual = os.strerror(error.errno)
        if "temporary directory" in str(error.strerror):  # of tempfile, which finds none
            return "no temporary folder can be written; free some space, or set TMPDIR to another"
        if error.errno == errno.ENOSPC and error.strerror not in (None, usual):
            return error.strerror  # our own, with the bytes that are missing
        return REASONS.get(error.errno, usual.lower())
    return None


def offence(item: Mapping[str, Any]) -> str:
    """One of pydantic's errors (``ValidationError.errors()``) in words."""
    kind, text = item["type"], str(item["msg"]).removeprefix("Value error, ")
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not known here; check its spelling"
    if kind == "string_pattern_mismatch" and NAME_PATTERN in text:
        return "use letters, digits and . _ - without spaces, at most 64, and begin with a letter or digit"
    if kind in ("model_type", "dict_type", "model_attributes_type", "dataclass_type"):
        return "must be a mapping, such as {key: value}"
    if kind == "string_too_short" and "at least 1 character" in text:
        return "must not be empty"
    return _SHOULD.sub("must ", text).partition(", unable to")[0]


def first_error(error: ValidationError, whole: str = "(body)") -> str:
    """The first offence in a model: its place (``whole``: the model itself) and what is wrong, without the input."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(str(part) for part in first['loc']) or whole}: {offence(first)}"


class Exit(IntEnum):
    """What a code means to the program that started it."""

    OK = 0  # of a client: the federation has ended, or SIGTERM asked to stop
    FAILED = 1  # an error in promptfed or at the coordinator (5xx)
    USAGE = 2  # the command line or the settings are wrong
    BAD_INPUT = 3  # a file, spec or data source is wrong, or holds classes that the federation does not know
    UNREACHABLE = 4  # no coordinator answered within the time that the settings allow, or no answer arrived whole
    NOT_ALLOWED = 5  # no token, a token that is not accepted, or one of another role
    REFUSED = 6  # the coordinator refused; its answer says why
    FEDERATION_ENDED_BADLY = 7  # the federation failed, paused by itself or was cancelled
    NAME_TAKEN = 8  # another client has enrolled under this name
    BACKBONE = 9  # the backbone cannot be loaded, is not permitted here, or is not the federation's
    WITHDRAWN = 10  # the operator has withdrawn this client, or its owner has withdrawn consent
    STATE = 11  # the state folder is in use, another client's, or damaged
    PROTOCOL = 12  # the coordinator has another protocol version or method, or answers what this version does not know
    DECLINED = 13  # the user declined; nothing was sent or done
    POLICY = 14  # the site's policy forbids it, or cannot be read
    LEDGER = 15  # the privacy budget is spent, or its ledger is damaged or an old copy
    INTERRUPTED = 130  # Ctrl-C


def collect_seldom() -> None:
    """For a process of ours, before it imports: at the usual 700 objects, collections take a tenth of its start."""
    gc.set_threshold(GARBAGE)
