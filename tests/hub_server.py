"""A small hub on localhost that speaks the Hugging Face Hub's protocol, and can be made to fail.

    with HubServer() as hub:
        hub.users["hf_..."] = "anna"
        subprocess.run([...], env={**os.environ, **hub.environment(home)})

It answers login, repositories, uploads (preupload, LFS batch, PUT, commit) and downloads with
ranges.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from local_server import Handler, LocalServer, Repo, git_oid, is_large


class _HuggingFace(Handler):
    hub: HubServer

    def routes(self) -> list[tuple[str, Callable[..., None]]]:
        """METHOD path -> handler; the groups of the path are its arguments."""
        name = r"([\w.-]+/[\w.-]+)"
        return [
            (r"GET /api/whoami-v2", self.whoami),
            (r"POST /oauth/device", self.device),
            (r"POST /oauth/token", self.token),
            (r"POST /api/repos/create", self.create),
            (r"POST /api/validate-yaml", self.validate),
            (rf"GET /api/models/{name}(?:/revision/[^/]+)?", self.info),
            (rf"GET /api/models/{name}/tree/[^/]+(?:/(.*))?", self.tree),
            (rf"POST /api/models/{name}/preupload/[^/]+", self.preupload),
            (rf"POST /api/models/{name}/commit/[^/]+", self.commit),
            (rf"POST /{name}\.git/info/lfs/objects/batch", self.batch),
            (r"PUT /lfs/([0-9a-f]{64})", self.put),
            (rf"HEAD|GET /{name}/resolve/[^/]+/(.+)", self.resolve),
        ]

    def whoami(self) -> None:
        if (name := self.user()) is None:
            self.answer(401, {"error": "Invalid credentials in Authorization header"})
            return
        access = {"accessToken": {"displayName": "tests", "role": "write"}}
        self.answer(200, {"type": "user", "name": name, "orgs": [], "auth": access})

    def device(self) -> None:
        where = f"{self.hub.url}/device"
        code = {"device_code": "d", "user_code": "ABCD-1234", "verification_uri": where}
        self.answer(200, {**code, "interval": 0, "expires_in": 60})

    def token(self) -> None:
        """The user has confirmed in the browser once the question is asked again."""
        token = next(iter(self.hub.users))
        if len(self.hub.asked("POST", "/oauth/token")) < 2:
            self.answer(400, {"error": "authorization_pending"})
        else:
            self.answer(200, {"access_token": token, "token_type": "bearer"})

    def create(self) -> None:
        asked = json.loads(self.body)
        if (user := self.user()) is None:
            self.answer(401, {"error": "Invalid username or password."})
            return
        owner = asked.get("organization") or user
        name = f"{owner}/{asked['name']}"
        if owner != user:
            self.answer(403, {"error": f"You don't have the rights to create under {owner}"})
        elif name in self.hub.repos:
            self.answer(
                409, {"error": "You already created this model repo", "url": self._at(name)}
            )
        else:
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.hub.repos[name] = Repo(private=private)
            self.answer(200, {"url": self._at(name), "id": name, "name": name})

    def validate(self) -> None:
        self.answer(200, {"errors": [], "warnings": []})

    def info(self, name: str) -> None:
        if (repo := self._readable(name)) is None:
            return
        names = [{"rfilename": path} for path in sorted(repo.files)]
        self.answer(
            200,
            {"id": name, "sha": repo.sha, "private": repo.private, "siblings": names, "tags": []},
        )

    def tree(self, name: str, folder: str | None) -> None:
        if (repo := self._readable(name)) is None:
            return
        if folder:
            self.answer(404, {"error": "no such folder"}, X_Error_Code="EntryNotFound")
            return
        self.answer(
            200,
            [
                {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
                for path, content in sorted(repo.files.items())
            ],
        )

    def preupload(self, name: str) -> None:
        if (repo := self._writable(name)) is None:
            return
        answers = []
        for item in json.loads(self.body)["files"]:
            path, there = item["path"], repo.files.get(item["path"])
            large = is_large(path, item["size"])
            known = None if there is None else _etag(repo, path)
            mode = "lfs" if large else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": known})
        self.answer(200, {"files": answers})

    def batch(self, name: str) -> None:
        if self._writable(name) is None:
            return
        objects = []
        for item in json.loads(self.body)["objects"]:
            answer: dict[str, Any] = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.blobs:
                answer["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
            objects.append(answer)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.answer(400, {"error": "these are not the bytes that were promised"})
            return
        self.hub.blobs[oid] = self.body
        self.answer(200, {})

    def commit(self, name: str) -> None:
        if (repo := self._writable(name)) is None:
            return
        lines = [json.loads(line) for line in self.body.splitlines()]
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
                repo.large.discard(value["path"])
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.hub.blobs[value["oid"]]
                repo.large.add(value["path"])
        repo.commits.append(lines[0]["value"]["summary"])
        at = f"{self._at(name)}/commit/{repo.sha}"
        self.answer(200, {"success": True, "commitOid": repo.sha, "commitUrl": at})

    def resolve(self, name: str, path: str) -> None:
        if (repo := self._readable(name)) is None:
            return
        if path not in repo.files:
            headers = {"X_Error_Code": "EntryNotFound", "X_Repo_Commit": repo.sha}
            self.answer(404, {"error": "Entry not found"}, **headers)
            return
        content = repo.files[path]
        headers = {"X-Repo-Commit": repo.sha, "Accept-Ranges": "bytes"}
        headers["ETag"] = f'"{_etag(repo, path)}"'
        if path in repo.large:
            headers |= {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(content))}
            if self.hub.store_url is not None:
                there = f"{self.hub.store_url}{self.path}"
                self.answer(302, b"", Location=there, **_as_arguments(headers))
                return
        self.answer_file(content, headers)

    def _at(self, name: str) -> str:
        return f"{self.hub.url}/{name}"

    def _readable(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        may = self.hub.open_to_all or self.user() == name.partition("/")[0]
        if repo is None or (repo.private and not may):
            self.answer(404 if self.user() else 401, {"error": "Repository not found"},
                        X_Error_Code="RepoNotFound")  # fmt: skip
            return None
        return repo

    def _writable(self, name: str) -> Repo | None:
        if self.user() != name.partition("/")[0]:
            self.answer(403 if self.user() else 401, {"error": "Forbidden"})
            return None
        return self._readable(name)


class HubServer(LocalServer):
    """The Hugging Face Hub."""

    handler = _HuggingFace
    store_url: str | None = None
    """Where large files lie, if not here; as with the real hub, nobody is asked who they are."""
    open_to_all = False

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """What points a process at this hub and at a cache of its own."""
        variables = {
            "HF_ENDPOINT": self.url, "HF_HOME": str(home / "hf"), "HOME": str(home),
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1", "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return variables if token is None else {**variables, "HF_TOKEN": token}


def _as_arguments(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("-", "_"): value for name, value in headers.items()}


def _etag(repo: Repo, path: str) -> str:
    content = repo.files[path]
    return hashlib.sha256(content).hexdigest() if path in repo.large else git_oid(content)
