"""A small ModelScope on localhost: login, repositories, uploads and downloads with ranges."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from local_server import Handler, LocalServer, Repo

PRIVATE = 1


class _ModelScope(Handler):
    def routes(self) -> list[tuple[str, Callable[..., None]]]:
        """METHOD path -> handler; the groups of the path are its arguments."""
        name = r"([\w.-]+/[\w.-]+)"
        return [
            (r"HEAD /", self.home),
            (r"POST /api/v1/login", self.login),
            (r"GET /openapi/v1/users/me", self.me),
            (r"POST /api/v1/models", self.create),
            (rf"GET /openapi/v1/models/{name}", self.info),
            (rf"POST /api/v1/repos/models/{name}/info/lfs/objects/batch", self.batch),
            (r"PUT /lfs/([0-9a-f]{64})", self.put),
            (rf"POST /api/v1/repos/models/{name}/commit/master", self.commit),
            (rf"GET /api/v1/models/{name}/repo/files", self.files),
            (rf"GET /api/v1/models/{name}/repo", self.download),
        ]

    def data(self, data: Any, **headers: str) -> None:
        """A good answer."""
        self.answer(200, {"Code": 200, "Success": True, "Data": data, "data": data}, **headers)

    def refuse(self, status: int, message: str) -> None:
        """A bad one."""
        self.answer(status, {"Code": status, "Success": False, "Message": message})

    def home(self) -> None:
        self.answer(200, b"")

    def login(self) -> None:
        token = json.loads(self.body)["AccessToken"]
        if token not in self.hub.users:
            self.refuse(401, "the token is not valid")
            return
        user = {"Username": self.hub.users[token], "Email": "", "AccessToken": "git-token"}
        self.data(user, Set_Cookie=f"m_session_id={token}; Path=/; Max-Age=86400")

    def me(self) -> None:
        if (user := self.user()) is None:
            self.refuse(401, "not logged in")
        else:
            self.data({"username": user})

    def create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked['Path']}/{asked['Name']}"
        if self.user() is None:
            self.refuse(401, "not logged in")
        elif self.user() != asked["Path"]:
            self.refuse(403, "no permission")
        elif name in self.hub.repos:
            self.refuse(400, f"the model {name} already exists")
        else:
            private = asked["Visibility"] == PRIVATE
            self.hub.repos[name] = Repo(private=private, licence=asked["License"])
            self.data({"Path": asked["Path"], "Name": asked["Name"]})

    def info(self, name: str) -> None:
        if (repo := self._repo(name)) is not None:
            self.data({"id": name, "private": repo.private})

    def batch(self, name: str) -> None:
        if self._repo(name) is None:
            return
        # Only what is needed is answered about.
        self.data(
            {
                "objects": [
                    {"oid": oid, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{oid}"}}}
                    for item in json.loads(self.body)["objects"]
                    if (oid := item["oid"]) not in self.hub.blobs
                ]
            }
        )

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            self.refuse(400, "these are not the bytes that were promised")
            return
        self.hub.blobs[oid] = self.body
        self.data({})

    def commit(self, name: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        asked = json.loads(self.body)
        for action in asked["actions"]:
            if action["type"] == "lfs":
                repo.files[action["path"]] = self.hub.blobs[action["sha256"]]
                repo.large.add(action["path"])
            else:
                repo.files[action["path"]] = base64.b64decode(action["content"])
        repo.commits.append(asked["commit_message"])
        self.data({"oid": repo.sha})

    def files(self, name: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        self.data(
            {
                "Files": [
                    {"Path": path, "Name": path, "Type": "blob", "Size": len(content),
                     "Sha256": hashlib.sha256(content).hexdigest()}
                    for path, content in sorted(repo.files.items())
                ]
            }
        )  # fmt: skip

    def download(self, name: str) -> None:
        if (repo := self._repo(name)) is None:
            return
        if (content := repo.files.get(self.query["FilePath"])) is None:
            self.refuse(404, "no such file")
        else:
            self.answer_file(content, {"Content-Type": "application/octet-stream"})

    def _repo(self, name: str) -> Repo | None:
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and self.user() != name.partition("/")[0]):
            self.refuse(404, "there is none of that name")
            return None
        return repo


class ModelScopeServer(LocalServer):
    """ModelScope."""

    handler = _ModelScope

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """What points a process at this server and at a cache of its own."""
        variables = {
            "MODELSCOPE_ENDPOINT": self.url, "MODELSCOPE_CACHE": str(home / "ms"),
            "MODELSCOPE_HOME": str(home / "modelscope"), "HOME": str(home), "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        return variables if token is None else {**variables, "MODELSCOPE_API_TOKEN": token}
