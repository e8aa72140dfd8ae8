"""Weights of the Hugging Face Hub, fetched so that an interrupted download goes on.

huggingface_hub 2 resumes a broken connection, but throws the file away when the process ends. So
the weights are put into its cache here, under the name it looks for (`blobs/<etag>`), from where
the last attempt stopped. What does not go this way is left to huggingface_hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from memfit.errors import ModelError
from memfit.hub.words import is_connection
from memfit.messages import t
from memfit.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub import HfFileMetadata

SMALLEST_BYTES = 8 * 2**20
"""Less than this is quicker fetched again than gone on with."""
WAITS_SECONDS = (1.0, 2.0, 4.0)
"""Between attempts that brought nothing new."""
_CHUNK_BYTES = 2**20


def prefetch(name: str) -> None:
    """The weights of a model into the cache; what goes wrong but the connection is left alone."""
    from huggingface_hub import try_to_load_from_cache

    files: list[str] = []
    with contextlib.suppress(Exception):  # a name that is none, no permission: told when it loads
        files = _weight_files(name)
    for file in files:
        if not isinstance(try_to_load_from_cache(name, file), str):
            _prefetch(name, file)


def _weight_files(name: str) -> list[str]:
    """Those transformers reads: safetensors where there are any."""
    from huggingface_hub import HfApi

    siblings = HfApi().model_info(name).siblings or []
    names = [item.rfilename for item in siblings if "/" not in item.rfilename]
    safe = [each for each in names if each.startswith("model") and each.endswith(".safetensors")]
    old = [each for each in names if each.startswith("pytorch_model") and each.endswith(".bin")]
    return sorted(safe or old)


def _prefetch(name: str, file: str) -> None:
    from filelock import FileLock, Timeout

    about = _about(name, file)
    if about is None or about.size is None or about.size < SMALLEST_BYTES:
        return
    blob = _blob(name, str(about.etag))
    if blob.exists():
        return
    part = blob.with_name(f"{blob.name}.memfit.incomplete")
    lock = _folder(name, ".locks") / f"{blob.name}.memfit.lock"
    for needed in (part, lock):
        needed.parent.mkdir(parents=True, exist_ok=True)
    # Where another process is at it already, huggingface_hub fetches a copy of its own.
    with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
        _fetch(name, file, part)
        if part.exists() and _is_whole(part, about):
            part.replace(blob)
        part.unlink(missing_ok=True)


def _blob(name: str, etag: str) -> Path:
    return _folder(name) / "blobs" / etag


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
    waits = list(WAITS_SECONDS)
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
                waits = list(WAITS_SECONDS)
            elif not waits:
                said = {"name": name, "bytes": format_bytes(before), "file": file}
                raise ModelError(
                    t(
                        "the download of {name} stopped: the connection failed with {bytes} of "
                        "{file} fetched; the same command goes on there",
                        **said,
                    )
                ) from None
            time.sleep(waits.pop(0))


def _append(about: HfFileMetadata, part: Path, file: str) -> None:
    from huggingface_hub import constants, get_session

    begun = _size(part)
    headers = {
        **_headers(about.location),
        "Range": f"bytes={begun}-",
        "Accept-Encoding": "identity",
    }
    answered = get_session().stream(
        "GET",
        about.location,
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        follow_redirects=True,
    )
    with answered as response:
        response.raise_for_status()
        mode = "ab" if response.status_code == 206 else "wb"
        with part.open(mode) as target, _bar(file, about.size, begun) as bar:
            for chunk in response.iter_bytes(chunk_size=_CHUNK_BYTES):
                target.write(chunk)
                bar.update(len(chunk))


def _headers(location: str) -> dict[str, str]:
    """The token goes to the hub and never to the store a large file lies in."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    same = urlsplit(location).netloc == urlsplit(constants.ENDPOINT).netloc
    return dict(build_hf_headers(token=None if same else False))


@contextlib.contextmanager
def _bar(file: str, total_bytes: int | None, begun_bytes: int) -> Iterator[Any]:
    """A bar on a terminal once it takes two seconds."""
    from huggingface_hub.utils.tqdm import tqdm

    bar: Any = tqdm  # its own signature has no types
    with bar(
        desc=file, total=total_bytes, initial=begun_bytes, unit="B", unit_scale=True, delay=2,
        disable=None, leave=False,
    ) as shown:  # fmt: skip
        yield shown


def _is_whole(part: Path, about: HfFileMetadata) -> bool:
    """The bytes that were promised: large files are named after their checksum."""
    if part.stat().st_size != about.size:
        return False
    etag = str(about.etag)
    if len(etag) != 64:
        return True
    with part.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == etag


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
