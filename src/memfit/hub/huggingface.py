"""The Hugging Face Hub, or the mirror HF_ENDPOINT names, through huggingface_hub.

An upload is one commit: a half-uploaded model is never what others get. `upload_large_folder`
commits in parts and is gone from huggingface_hub 2; `create_commit` sends the weights first, asks
the hub which of them it has already, and so goes on where an interrupted upload stopped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memfit.errors import ConfigError, MemfitError, ModelError
from memfit.hub.words import causes, is_connection, reason
from memfit.messages import N_, t

if TYPE_CHECKING:
    from huggingface_hub import HfApi

    from memfit.hub.folder import Upload

WAITS_SECONDS = (1.0, 4.0)
"""Between attempts at a commit; huggingface_hub retries single requests itself."""
_MESSAGE = "Upload model, tokenizer and card with memfit"


def endpoint() -> str:
    """Where the hub is."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def is_off() -> bool:
    """Whether HF_HUB_OFFLINE keeps every request in."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


# ---- down ----


def source_of(name: str, *, weights: bool) -> str:
    """The id itself where the hub answers; else the cache's folder, without waiting for retries."""
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    from memfit.hub.download import prefetch

    try:
        if answers(name):
            if weights:
                prefetch(name)
            return name
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return name  # transformers says what is wrong with it
    if isinstance(cached, str):
        return str(Path(cached).parent)
    cache = constants.HF_HUB_CACHE
    raise ModelError(
        t(
            "cannot get the model {name}: there is no folder of that name, and the hub {why}; "
            "nor is it in the cache ({cache})",
            name=name,
            why=why_silent(),
            cache=cache,
        )
    )


def why_silent() -> str:
    """Why the hub does not answer, after `answers` was false."""
    if is_off():
        return t("is switched off (HF_HUB_OFFLINE=1)")
    return t("cannot be reached ({address})", address=endpoint())


def answers(name: str) -> bool:
    """Whether the hub says anything at all about a model; asked once, for some seconds."""
    from huggingface_hub import constants, get_session, hf_hub_url

    address = hf_hub_url(name, "config.json")
    if is_off():
        return False
    try:
        get_session().head(address, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # whatever kept the question from being answered: name, route, proxy, TLS
        return False
    return True


# ---- up ----


def login(token: str | None, *, force: bool) -> str:
    """The hub's own login; a token that is there and still works is kept unless forced."""
    from huggingface_hub import get_token
    from huggingface_hub import login as hub_login

    _refuse_offline()
    if token is None and not force and get_token() is not None:
        with contextlib.suppress(MemfitError):
            return _user()
    with _explained("login", token):
        if token is not None:
            hub_login(token)
        else:
            hub_login(skip_if_logged_in=False)
    return _user()


def _user() -> str:
    from huggingface_hub import HfApi

    with _explained("who"):
        return str(HfApi().whoami()["name"])


def upload(what: Upload) -> str:
    """One commit with the files and the card; returns the repository's address."""
    from huggingface_hub import HfApi

    _refuse_offline()
    api = HfApi()
    with _explained("upload", repo=what.repo):
        made = api.create_repo(what.repo, private=True if what.private else None, exist_ok=True)
        if what.private and not api.model_info(what.repo).private:
            raise ConfigError(
                t(
                    "{repo} exists already and is public, so that nothing was uploaded; make "
                    "it private in its settings, or name another repository",
                    repo=what.repo,
                )
            )
        _commit(api, what)
    return str(made)


def _commit(api: HfApi, what: Upload) -> None:
    with contextlib.ExitStack() as plainly:
        for wait in (*WAITS_SECONDS, None):
            try:
                api.create_commit(what.repo, _operations(what), commit_message=_MESSAGE)
                return
            except Exception as error:
                if _lacks_xet(error):
                    plainly.enter_context(_without_xet())
                elif wait is None or not _may_pass(error):
                    raise
                else:
                    time.sleep(wait)


def _operations(what: Upload) -> list[Any]:
    """Made anew for each attempt: an operation remembers what became of it in the one before."""
    from huggingface_hub import CommitOperationAdd

    added = [(file.name, str(file)) for file in what.files]
    return [
        *(CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in added),
        CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=what.card),
    ]


def _lacks_xet(error: BaseException) -> bool:
    """Mirrors and hubs of one's own may know large files only the older way (LFS)."""
    from huggingface_hub import constants

    said = " ".join(str(each) for each in causes(error))
    return not constants.HF_HUB_DISABLE_XET and "xet-write-token" in said and "404" in said


@contextlib.contextmanager
def _without_xet() -> Iterator[None]:
    """What HF_HUB_DISABLE_XET=1 does, for this upload."""
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = False


def _refuse_offline() -> None:
    if is_off():
        raise ConfigError(
            t("the hub is switched off (HF_HUB_OFFLINE=1); take that out of the environment first")
        )


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


def _may_pass(error: BaseException) -> bool:
    """Whether trying again may help."""
    return any(
        is_connection(each) or (_status(each) or 0) in (408, 429, 500, 502, 503, 504)
        for each in causes(error)
    )


@contextlib.contextmanager
def _explained(doing: str, *secrets: str | None, repo: str = "") -> Iterator[None]:
    """Every way it fails as one sentence, with no token in it."""
    try:
        yield
    except MemfitError:
        raise
    except Exception as error:
        raise _sentence(error, doing, repo, *secrets) from None


_DOING = {
    "login": N_("log in"),
    "who": N_("ask who is logged in"),
    "upload": N_("upload to {repo}"),
}


def _sentence(error: Exception, doing: str, repo: str, *secrets: str | None) -> MemfitError:
    from huggingface_hub import get_token
    from huggingface_hub.errors import LocalTokenNotFoundError

    said = t(_DOING[doing], repo=repo)
    chain = causes(error)
    status = next((code for each in chain if (code := _status(each)) is not None), None)
    if status == 401 or any(isinstance(each, LocalTokenNotFoundError) for each in chain):
        given = bool(get_token() or any(secrets))
        if doing == "login":
            kind = (
                N_("cannot {doing}: the hub does not accept the token")
                if given
                else N_("cannot {doing}: the hub knows no token")
            )
            return ConfigError(t(kind, doing=said))
        kind = (
            N_(
                "cannot {doing}: the hub does not accept the token; log in with memfit login, "
                "or set HF_TOKEN"
            )
            if given
            else N_(
                "cannot {doing}: the hub knows no token; log in with memfit login, or set HF_TOKEN"
            )
        )
        return ConfigError(t(kind, doing=said))
    if status == 403:
        return ConfigError(
            t(
                "cannot {doing}: the token may not write there; make one that may "
                "({address}/settings/tokens) and log in again with memfit login --force",
                doing=said,
                address=endpoint(),
            )
        )
    if any(is_connection(each) for each in chain):
        kind = (
            N_(
                "cannot {doing}: the connection to {address} failed; the same command goes on "
                "where it stopped"
            )
            if doing == "upload"
            else N_("cannot {doing}: the connection to {address} failed")
        )
        return MemfitError(t(kind, doing=said, address=endpoint()))
    why = reason(error, get_token(), *secrets)
    return MemfitError(t("cannot {doing}: {reason}", doing=said, reason=why))
