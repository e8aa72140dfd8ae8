"""ModelScope, through its own light client (the extra `modelscope`).

The client goes on with interrupted downloads (HTTP ranges, checksums) and asks before an upload
which weights ModelScope has already. MODELSCOPE_ENDPOINT names another address, and
MODELSCOPE_API_TOKEN a token, as everywhere with ModelScope.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from memfit.errors import ConfigError, MemfitError, ModelError
from memfit.i18n import N_, t
from memfit.models.hubs import explained, is_set, reason, refuse_if

if TYPE_CHECKING:
    from modelscope_hub import HubApi, HubConfig

    from memfit.models.hubs import Upload

INSTALL = 'pip install "memfit[modelscope]"'
SECONDS_TO_ANSWER = 10

# Other frameworks' weights; pickled ones too where safetensors are there.
_NOT_OURS = ("*.h5", "*.msgpack", "*.onnx", "*.ot", "*.ckpt*", "*.gguf", "onnx/*", "openvino/*")


def endpoint() -> str:
    """Where ModelScope is."""
    return str(_config().endpoint)


def is_off() -> bool:
    """ModelScope has no switch of its own; the hub's is meant for all traffic."""
    return is_set("HF_HUB_OFFLINE")


# ---- down ----


def download(name: str, *, weights: bool = True) -> Path:
    """The folder a model lies in, fetched as far as it is not there yet."""
    owner, slash, model = name.partition("/")
    if not (owner and slash and model):
        raise ModelError("modelscope:{name} is not of the form modelscope:org/name", name=name)
    config = _config()
    silent = (
        t("is switched off (HF_HUB_OFFLINE=1)") if is_off() else _why_silent(str(config.endpoint))
    )
    with _explained(t("get the model {name}", name=f"modelscope:{name}"), config.token):
        if silent is not None:
            return _from_cache(config, name, silent)
        api = _api(config)
        listed = [item.path for item in api.list_repo_files(name, "model")]
        ignored = list(_NOT_OURS)
        if not weights:
            ignored += ["*.bin", "*.safetensors"]
        elif any(path.endswith(".safetensors") and "/" not in path for path in listed):
            ignored.append("*.bin")
        return api.download_repo(name, "model", ignore_patterns=ignored)


def _from_cache(config: HubConfig, name: str, silent: str) -> Path:
    from modelscope_hub import CacheNotFound

    try:
        return _api(config).download_repo(name, "model", local_files_only=True)
    except CacheNotFound:
        said = {"name": name, "why": silent, "cache": config.cache_dir}
        raise ModelError(
            "cannot get the model modelscope:{name}: ModelScope {why}, and it is not in "
            "the cache ({cache})",
            **said,
        ) from None


def _why_silent(address: str) -> str | None:
    """None where ModelScope answers; asked once, since the client asks for minutes."""
    import requests

    try:
        requests.head(address, timeout=SECONDS_TO_ANSWER)
    except requests.RequestException:
        return t("cannot be reached ({address})", address=address)
    return None


# ---- up ----


def login(token: str | None, *, force: bool) -> str:
    """Keeps the token where ModelScope's own tools find it; returns the user's name."""
    refuse_if(is_off())
    config = _config()
    if token is None and not force and config.token:
        with contextlib.suppress(MemfitError):
            return _user(config)
    if token is None:
        raise ConfigError(
            "no token given; make one at https://modelscope.cn/my/myaccesstoken and paste "
            "it into memfit login --to modelscope, or set MODELSCOPE_API_TOKEN"
        )
    with _explained(t("log in to ModelScope"), token):
        return str(_api(config).login(token).username)


def _user(config: HubConfig) -> str:
    with _explained(t("ask who is logged in to ModelScope"), config.token):
        return str(_api(config).whoami().username)


def upload(what: Upload) -> str:
    """The model in one commit and the card in the next; returns the repository's address."""
    refuse_if(is_off())
    config = _config()
    if not config.token:
        raise ConfigError(
            "cannot upload to {repo}: not logged in to ModelScope; log in with memfit "
            "login --to modelscope, or set MODELSCOPE_API_TOKEN",
            repo=what.repo,
        )
    with _explained(t("upload to {repo}", repo=what.repo), config.token):
        api = _api(config)
        _create(api, what)
        api.upload_folder(
            what.repo,
            "model",
            what.folder,
            allow_patterns=list(what.paths),
            commit_message="Upload model and tokenizer with memfit",
            # It would keep a file in the user's folder and believe it even where the
            # repository is gone; ModelScope itself says which weights it has.
            use_cache=False,
            disable_tqdm=not sys.stderr.isatty(),
        )
        api.upload_file(
            what.repo, "model", what.card, "README.md", commit_message="Model card by memfit"
        )
    return f"{config.endpoint}/models/{what.repo}"


def _create(api: HubApi, what: Upload) -> None:
    from modelscope_hub import Visibility
    from modelscope_hub.errors import AlreadyExistsError

    seen = "private" if what.private else "public"
    try:
        # Without a licence the client would name one of its own choice.
        api.create_repo(what.repo, "model", visibility=seen, license=what.licence)
    except AlreadyExistsError:
        known = api.get_repo(what.repo, "model")
        is_private = bool(known.private) or known.visibility == Visibility.PRIVATE
        if what.private and not is_private:
            raise ConfigError(
                "{repo} exists already and is public, so that nothing was uploaded; make "
                "it private in its settings, or name another repository",
                repo=what.repo,
            ) from None


def _config() -> HubConfig:
    """What the environment and an earlier login say now."""
    if importlib.util.find_spec("modelscope_hub") is None:
        raise ConfigError(
            "ModelScope needs its client, which is not installed: {command}", command=INSTALL
        )
    from modelscope_hub import HubConfig

    return HubConfig()


def _api(config: HubConfig) -> HubApi:
    from modelscope_hub import HubApi

    return HubApi(config)


@contextlib.contextmanager
def _explained(doing: str, *secrets: str | None) -> Iterator[None]:
    """Every way it fails as one sentence, with no token in it.

    The client prints reports and logs every retry; the error says it once.
    """
    log = logging.getLogger("modelscope_hub")
    before = log.level
    log.setLevel(logging.CRITICAL)
    bars = (
        contextlib.nullcontext()
        if sys.stderr.isatty()
        else contextlib.redirect_stderr(io.StringIO())
    )
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            bars,
            explained(lambda error: _sentence(error, doing, *secrets)),
        ):
            yield
    finally:
        log.setLevel(before)


def _sentence(error: Exception, doing: str, *secrets: str | None) -> MemfitError:
    from modelscope_hub import errors

    if isinstance(error, errors.AuthenticationError):
        login = doing == t("log in to ModelScope")
        kind = (
            N_(
                "cannot {doing}: ModelScope does not accept the token; log in with memfit "
                "login --to modelscope, or set MODELSCOPE_API_TOKEN"
            )
            if not login
            else N_("cannot {doing}: ModelScope does not accept the token")
        )
        return ConfigError(kind, doing=doing)
    if isinstance(error, errors.PermissionDeniedError):
        return ConfigError("cannot {doing}: your token may not do that on ModelScope", doing=doing)
    if isinstance(error, errors.NotExistError):
        return ModelError("cannot {doing}: ModelScope has none of that name", doing=doing)
    failed = (errors.NetworkError, errors.RequestTimeoutError, errors.FileDownloadError)
    if isinstance(error, (*failed, errors.StorageError)):
        return MemfitError(
            "cannot {doing}: the connection to {address} failed; the same command goes on "
            "where it stopped",
            doing=doing,
            address="ModelScope",
        )
    return MemfitError("cannot {doing}: {reason}", doing=doing, reason=reason(error, *secrets))
