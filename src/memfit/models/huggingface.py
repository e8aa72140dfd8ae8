"""The Hugging Face Hub, or the mirror HF_ENDPOINT names, through huggingface_hub.

An upload is one commit: a half-uploaded model is never what others get. `upload_large_folder`
commits in parts and is gone from huggingface_hub 2; `create_commit` sends the weights first, asks
the hub which of them it has already, and so goes on where an interrupted upload stopped.

huggingface_hub 2 resumes a broken connection, but throws the file away when the process ends. So
the weights are put into its cache here, under the name it looks for (`blobs/<etag>`), from where
the last attempt stopped. What does not go this way is left to huggingface_hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from memfit.errors import ConfigError, MemfitError, ModelError
from memfit.i18n import N_, t
from memfit.models.hubs import causes, explained, is_connection, reason, refuse_if
from memfit.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfApi, HfFileMetadata

    from memfit.models.hubs import Upload

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
        "cannot get the model {name}: there is no folder of that name, and the hub {why}; "
        "nor is it in the cache ({cache})",
        name=name,
        why=why_silent(),
        cache=cache,
    )


def why_silent() -> str:
    """Why the hub does not answer, after `answers` was false."""
    if is_off():
        return t("is switched off (HF_HUB_OFFLINE=1)")
    return t(
        "cannot be reached ({address}; name a mirror with HF_ENDPOINT=https://hf-mirror.com, or "
        "give a model of ModelScope as modelscope:org/name)",
        address=endpoint(),
    )


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

    refuse_if(is_off())
    if token is None and not force and get_token() is not None:
        with contextlib.suppress(MemfitError):
            return _user()
    with explained(lambda error: _sentence(error, "login", "", token)):
        if token is not None:
            hub_login(token)
        else:
            hub_login(skip_if_logged_in=False)
    return _user()


def _user() -> str:
    from huggingface_hub import HfApi

    with explained(lambda error: _sentence(error, "who", "")):
        return str(HfApi().whoami()["name"])


def upload(what: Upload) -> str:
    """One commit with the files and the card; returns the repository's address."""
    from huggingface_hub import HfApi

    refuse_if(is_off())
    api = HfApi()
    with explained(lambda error: _sentence(error, "upload", what.repo)):
        made = api.create_repo(what.repo, private=True if what.private else None, exist_ok=True)
        if what.private and not api.model_info(what.repo).private:
            raise ConfigError(
                "{repo} exists already and is public, so that nothing was uploaded; make "
                "it private in its settings, or name another repository",
                repo=what.repo,
            )
        _commit(api, what)
    return str(made)


def _commit(api: HfApi, what: Upload) -> None:
    """One commit; tried again where that may help, without Xet where the hub lacks it."""
    from huggingface_hub import CommitOperationAdd, constants

    with contextlib.ExitStack() as plainly:
        for wait in (*WAITS_SECONDS, None):
            # Made anew for each attempt: an operation remembers what became of it before.
            added: dict[str, str | bytes] = {name: str(file) for name, file in what.paths.items()}
            operations = [
                CommitOperationAdd(path_in_repo=name, path_or_fileobj=content)
                for name, content in {**added, "README.md": what.card}.items()
            ]
            try:
                api.create_commit(what.repo, operations, commit_message=_MESSAGE)
                return
            except Exception as error:
                chain = causes(error)
                said = " ".join(map(str, chain))
                # Mirrors and hubs of one's own may know large files only the older way (LFS).
                lacks_xet = "xet-write-token" in said and "404" in said
                if lacks_xet and not constants.HF_HUB_DISABLE_XET:
                    constants.HF_HUB_DISABLE_XET = True
                    plainly.callback(setattr, constants, "HF_HUB_DISABLE_XET", False)
                elif wait is None or not any(
                    is_connection(one) or _status(one) in (408, 429, 500, 502, 503, 504)
                    for one in chain
                ):
                    raise
                else:
                    time.sleep(wait)


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    return status if isinstance(status, int) else None


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
            return ConfigError(kind, doing=said)
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
        return ConfigError(kind, doing=said)
    if status == 403:
        return ConfigError(
            "cannot {doing}: the token may not write there; make one that may "
            "({address}/settings/tokens) and log in again with memfit login --force",
            doing=said,
            address=endpoint(),
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
        return MemfitError(kind, doing=said, address=endpoint())
    why = reason(error, get_token(), *secrets)
    return MemfitError("cannot {doing}: {reason}", doing=said, reason=why)


SMALLEST_BYTES = 8 * 2**20
"""Less than this is quicker fetched again than gone on with."""

DOWNLOAD_WAITS_SECONDS = (1.0, 2.0, 4.0)
"""Between attempts that brought nothing new."""

_CHUNK_BYTES = 2**20


def prefetch(name: str) -> None:
    """The weights of a model into the cache; what goes wrong but the connection is left alone."""
    from huggingface_hub import HfApi, try_to_load_from_cache

    names: list[str] = []
    with contextlib.suppress(Exception):  # a name that is none, no permission: told when it loads
        siblings = HfApi().model_info(name).siblings or []
        names = [item.rfilename for item in siblings if "/" not in item.rfilename]
    safe = [each for each in names if each.startswith("model") and each.endswith(".safetensors")]
    old = [each for each in names if each.startswith("pytorch_model") and each.endswith(".bin")]
    for file in sorted(safe or old):  # what transformers reads
        if not isinstance(try_to_load_from_cache(name, file), str):
            _prefetch(name, file)


def _prefetch(name: str, file: str) -> None:
    from filelock import FileLock, Timeout

    about = _about(name, file)
    if about is None or about.size is None or about.size < SMALLEST_BYTES:
        return
    blob = _folder(name) / "blobs" / str(about.etag)
    if blob.exists():
        return
    part = blob.with_name(f"{blob.name}.memfit.incomplete")
    lock = _folder(name, ".locks") / f"{blob.name}.memfit.lock"
    for needed in (part, lock):
        needed.parent.mkdir(parents=True, exist_ok=True)
    # Where another process is at it already, huggingface_hub fetches a copy of its own.
    with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
        _fetch(name, file, part)
        if _size(part) == about.size:
            with part.open("rb") as read:
                digest = hashlib.file_digest(read, "sha256").hexdigest()
            # Large files are named after their checksum.
            if digest == blob.name or len(blob.name) != len(digest):
                part.replace(blob)
        part.unlink(missing_ok=True)


def _folder(name: str, *within: str) -> Path:
    """A repository's folder in the cache, or its twin for locks."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE, *within, repo_folder_name(repo_id=name, repo_type="model"))


def _about(name: str, file: str) -> HfFileMetadata | None:
    """Where the file is, how large, and its name in the cache; None where the hub says less."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    try:
        about = get_hf_file_metadata(hf_hub_url(name, file))
    except Exception as error:
        if is_connection(error):
            raise
        return None
    return about if about.etag is not None else None


def _fetch(name: str, file: str, part: Path) -> None:
    """Appends until all is there; an attempt that brings something may be followed by another."""
    waits = list(DOWNLOAD_WAITS_SECONDS)
    while True:
        before = _size(part)
        try:
            about = _about(name, file)  # the address of large files is valid for some time only
            if about is None or about.size is None or before >= about.size:
                return
            _append(about, part, file)
        except Exception as error:
            if not is_connection(error):
                part.unlink(missing_ok=True)
                return
            if _size(part) > before:
                waits = list(DOWNLOAD_WAITS_SECONDS)
            elif not waits:
                said = {"name": name, "bytes": format_bytes(before), "file": file}
                raise ModelError(
                    "the download of {name} stopped: the connection failed with {bytes} of "
                    "{file} fetched; the same command goes on there",
                    **said,
                ) from None
            time.sleep(waits.pop(0))


def _append(about: HfFileMetadata, part: Path, file: str) -> None:
    from huggingface_hub import constants, get_session
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]
    from huggingface_hub.utils.tqdm import tqdm

    begun = _size(part)
    # The token goes to the hub and never to the store a large file lies in.
    same = urlsplit(about.location).netloc == urlsplit(constants.ENDPOINT).netloc
    headers = dict(build_hf_headers(token=None if same else False))
    headers |= {"Range": f"bytes={begun}-", "Accept-Encoding": "identity"}
    answered = get_session().stream(
        "GET",
        about.location,
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        follow_redirects=True,
    )
    bar: Any = tqdm  # its own signature has no types
    with answered as response:
        response.raise_for_status()
        mode = "ab" if response.status_code == 206 else "wb"
        with (
            part.open(mode) as target,
            bar(
                desc=file, total=about.size, initial=begun, unit="B", unit_scale=True, delay=2,
                disable=None, leave=False,
            ) as shown,
        ):  # fmt: skip
            for chunk in response.iter_bytes(chunk_size=_CHUNK_BYTES):
                target.write(chunk)
                shown.update(len(chunk))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
