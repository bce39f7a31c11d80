"""The Hub's side of a push: the repository, and one commit by huggingface_hub's ``upload_folder``."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clustertune import secrets
from clustertune.console import say, stderr
from clustertune.errors import ExitCode, UserError
from clustertune.push.upload import Upload, pack
from clustertune.rundir import RunDir

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
_REPO = re.compile(rf"{_NAME}/{_NAME}")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
MESSAGE = "Adapter trained with clustertune"


@dataclass(frozen=True)
class Pushed:
    """How it ended."""

    status: str
    """``pushed``, or ``unchanged`` where everything was there already."""
    url: str
    commit: str | None


def check_name(repo: str | None) -> str:
    """The repository's name. Raises UserError where it is none."""
    fix = "--repo OWNER/NAME, letters, digits, '.', '_' and '-'"
    if repo is None:
        raise UserError("no repository is named", file="command line", key="--repo", fix=fix)
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo or repo.endswith((".git", ".", "-")):
        raise UserError(f"{repo!r} is not a repository's name", file="command line", key="--repo", fix=fix)
    return repo


def upload_for(run: RunDir, repo: str, licence: str | None = None) -> Upload:
    """What would be sent of a run, looked through for the secrets of ``.env``. Raises UserError."""
    found = secrets.read_env(secrets.DEFAULT, lambda _note: None)
    return pack(run, repo, licence, [found[key] for key in secrets.SECRET if key in found])


def send(run: RunDir, repo: str, *, public: bool = False, licence: str | None = None) -> tuple[Upload, Pushed]:
    """Send a run's adapter and its card in one commit, with the token of ``.env``.

    Raises UserError: the repository's visibility, the token, the network. Nothing appears in the repository before the commit:
    after a failure the same command begins again. Files of the same names are replaced (the repository's history keeps them),
    others stay.
    """
    found = secrets.read_env(secrets.DEFAULT, lambda _note: None)
    upload = upload_for(run, check_name(repo), licence)
    if not (token := found.get("HF_TOKEN")):
        fix = "add a line HF_TOKEN=... to it; a token that may write: https://huggingface.co/settings/tokens"
        raise UserError("has no HF_TOKEN", file=str(secrets.DEFAULT), key="HF_TOKEN", fix=fix)
    secrets.drop()  # the client would take a token of the environment for requests of its own
    endpoint = (found.get("HF_ENDPOINT") or os.environ.get("HF_ENDPOINT") or "").rstrip("/") or None
    with secrets.lent({key: value for key, value in found.items() if key in _PROXIES}), _message(repo, endpoint, token):
        api = _connect(endpoint, token)
        before = _find(api, repo, public)
        if before is None:
            say(f"new {'public' if public else 'private'} repository {repo}")
            api.create_repo(repo, private=not public)
        with tempfile.TemporaryDirectory(prefix="clustertune-push-") as name:
            for file in upload.files:
                if file.path is None:
                    Path(name, file.name).write_bytes(file.data)
                else:
                    Path(name, file.name).symlink_to(file.path.resolve())
            commit = api.upload_folder(repo_id=repo, folder_path=name, commit_message=MESSAGE, parent_commit=before)
        status = "unchanged" if commit.oid == before else "pushed"
        return upload, Pushed(status, f"{api.endpoint}/{repo}", commit.oid)


def _connect(endpoint: str | None, token: str) -> HfApi:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    # It logs every request that it tries again; our own message says how the upload ended.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    # Xet sends the bytes to another host by another protocol; an adapter is small, and LFS answers for what it stored.
    constants.HF_HUB_DISABLE_XET = True
    if not stderr.is_terminal:
        disable_progress_bars()
    return HfApi(endpoint=endpoint, token=token)


def _find(api: HfApi, repo: str, public: bool) -> str | None:
    """The repository's newest commit; None: this token sees none. Raises UserError for the other visibility."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError as error:
        if getattr(error.response, "status_code", None) == 401:
            api.whoami()  # the Hub answers 401 for what is not there, too: this tells a wrong token
        return None
    if not info.private and not public:
        fix = "--public says that you know, or --repo names another one"
        raise UserError("is public: the adapter would be seen by everybody", file=repo, key="--repo", fix=fix)
    if info.private and public:
        fix = "leave --public out, and change the visibility in the repository's settings"
        raise UserError("is private, and --public was asked for", file=repo, key="--public", fix=fix)
    return info.sha


@contextlib.contextmanager
def _message(repo: str, endpoint: str | None, token: str) -> Iterator[None]:
    """Everything that a client of the Hub raises, as a message without the token.

    What it prints meanwhile is dropped: warnings of the client name requests, and a person sees the message below.
    """
    import warnings

    from huggingface_hub.errors import HfHubHTTPError

    # The HTTPError of httpx or of httpx2: it differs with the release of the client.
    of_the_client: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except (of_the_client, OSError, ValueError, RuntimeError) as error:
        raise _explain(error, repo, endpoint, token) from None


def _explain(error: Exception, repo: str, endpoint: str | None, token: str) -> UserError:
    """The Hub's own words, with what to do about them."""
    response = getattr(error, "response", None)
    status = int(getattr(response, "status_code", 0))
    lines = str(error).replace(token, "***").strip().splitlines()
    said = (lines[0] if lines else type(error).__name__)[:300]
    where = endpoint or "https://huggingface.co"
    if isinstance(error, ValueError) or (400 <= status < 500 and status not in (409, 412, 429)):
        owner = repo.partition("/")[0]
        fix = f"HF_TOKEN of .env must be one that may write for {owner}: https://huggingface.co/settings/tokens"
        return UserError(f"the Hub refuses it ({status or type(error).__name__}): {said}", file=repo, fix=fix)
    fix = "nothing was committed: run the same command again"
    return UserError(f"{where} answers {status or 'nothing'}: {type(error).__name__}: {said}", fix=fix, code=ExitCode.AGAIN)
