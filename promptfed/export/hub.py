"""Exports on the Hugging Face hub (``hf:owner/name``), uploaded and downloaded with the hub's library."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from promptfed.export.export import check_new
from promptfed.export.reading import open_export, read_export
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.api.export_card import MARKDOWN_FILE
from promptfed.shared.service.reasons import why

SCHEME = "hf:"
README = "README.md"  # the page that the hub shows for a repository


def repository_of(address: str) -> str:
    """``owner/name`` of ``hf:owner/name``.

    Raises:
        CommandError: the address has another form.
    """
    name = address.removeprefix(SCHEME)
    if not address.startswith(SCHEME) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise CommandError(f"{address!r} is not a repository on the hub: write hf:owner/name", Exit.BAD_INPUT)
    return name


def open_hub(token_needed: bool) -> Any:
    """The hub's client, at $HF_ENDPOINT if it is set, with the token that the hub's library finds.

    Raises:
        CommandError: the library is not installed, or a token is needed and there is none.
    """
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError:
        text = "the hub's library is not installed: pip install huggingface_hub"
        raise CommandError(text, Exit.BAD_INPUT) from None
    token = get_token()
    if token_needed and not token:
        text = "no token for the hub: set HF_TOKEN, or log in with `hf auth login`"
        raise CommandError(text, Exit.NOT_ALLOWED)
    return HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)


def push(folder: Path, address: str, public: bool = False) -> str:
    """Upload the export in ``folder`` to ``address`` and return its web address. A new repository is private.

    Raises:
        CommandError: the folder is not an export, or the hub refuses.
    """
    repository = repository_of(address)
    read_export(folder)
    hub = open_hub(token_needed=True)
    try:
        where = hub.create_repo(repository, exist_ok=True, private=not public)
        with tempfile.TemporaryDirectory(prefix="promptfed-hub-") as copy:
            whole = Path(copy) / "export"
            shutil.copytree(folder, whole)
            shutil.copyfile(folder / MARKDOWN_FILE, whole / README)
            hub.upload_folder(repo_id=repository, folder_path=str(whole), commit_message="promptfed export")
    except Exception as error:  # the library raises many kinds of errors
        raise CommandError(f"{address}: the hub refuses: {_line(error)}", Exit.REFUSED) from None
    return str(where)


def pull(address: str, out: Path, revision: str | None = None, key: str | None = None) -> None:
    """Fetch the export at ``address`` into the new folder ``out``. If it is not an export, no files are left behind.

    The card must name every file. With a coordinator's public ``key`` the signature is checked first.

    Raises:
        CommandError: the hub refuses, it is not an export, or it is not signed with the key.
    """
    repository = repository_of(address)
    check_new(out)
    hub = open_hub(token_needed=False)
    out = out.resolve()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as folder:
            fetched = Path(folder) / "export"
            try:
                hub.snapshot_download(repo_id=repository, revision=revision, local_dir=str(fetched))
            except Exception as error:  # as above
                raise CommandError(f"{address} cannot be fetched: {_line(error)}", Exit.REFUSED) from None
            shutil.rmtree(fetched / ".cache", ignore_errors=True)  # the library's own bookkeeping
            for name in (".gitattributes", README):  # files of the hub, and the page that `push` writes
                (fetched / name).unlink(missing_ok=True)
            open_export(fetched, key, whole=True)
            if out.exists():
                out.rmdir()
            os.rename(fetched, out)
    except OSError as error:
        raise CommandError(f"cannot write {out}: {why(error)}", Exit.BAD_INPUT) from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
