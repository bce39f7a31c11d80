"""A Hub on loopback that speaks what a push needs (model info, repositories, LFS and one commit), and what a download does."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlparse

TOKEN = "hf_" + "a1B2" * 8
"""The one token that may write; assembled, so that no scanner takes this file for a leak."""


def oid(body: bytes) -> str:
    """The name that git gives a file."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


@dataclass
class Repo:
    """One repository: its files, which of them are in LFS, and its commits."""

    private: bool
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b"*.safetensors filter=lfs\n"})
    lfs: set[str] = field(default_factory=set)
    commits: list[str] = field(default_factory=lambda: [oid(b"0")])

    def entry(self, name: str) -> dict[str, Any]:
        """What both the list of a repository and that of its tree say about a file."""
        body = self.files[name]
        found = {"rfilename": name, "path": name, "type": "file", "size": len(body), "blobId": oid(body), "oid": oid(body)}
        if name in self.lfs:
            digest = hashlib.sha256(body).hexdigest()
            found["lfs"] = {"sha256": digest, "oid": digest, "size": len(body), "pointerSize": 130}
        return found


@dataclass
class FakeHub:
    """What the server knows, and what it shall do wrong."""

    repos: dict[str, Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    fail: dict[str, int] = field(default_factory=dict)
    """Part of a path: the status that it is answered with; 0 closes the connection in the midst."""
    read_only: bool = False
    spoil: bool = False
    """Store something else than was sent."""
    spoilt: str = ""
    """The name of a file that arrives with a changed byte."""
    url: str = ""

    def serve(self) -> http.server.ThreadingHTTPServer:
        hub = self

        class Handler(_Handler):
            state = hub

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


class _Handler(http.server.BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlparse(self.path).path)
        self.state.asked.append(f"{self.command} {path}")
        for part, status in self.state.fail.items():
            if part in path:
                if status == 0:
                    self.close_connection = True
                    self.connection.close()
                    return
                self._json({"error": "planned"}, status)
                return
        if path.startswith("/blob/"):
            self.state.blobs[path.removeprefix("/blob/")] = body
            self._json({})
            return
        if "/resolve/" in path:
            self._download(*path.removeprefix("/datasets").strip("/").split("/resolve/"))
            return
        given = self.headers.get("Authorization")
        if given != f"Bearer {TOKEN}" and (given or self.command != "GET"):
            self._json({"error": "Invalid username or password."}, 401)
            return
        self._api(path, body)

    def _api(self, path: str, body: bytes) -> None:
        if path == "/api/whoami-v2":
            self._json({"name": "me", "type": "user"})
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            actions = [
                {**o, "actions": {"upload": {"href": f"{self.state.url}/blob/{o['oid']}"}}} for o in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": actions})
        elif path.startswith(("/api/models/", "/api/datasets/")):
            self._repository(path.split("/", 3)[3], body)
        else:
            self._json({"error": f"no such path {path}"}, 404)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization', 'me')}/{asked['name']}"
        if self.state.read_only:
            self._json({"error": "no rights"}, 403)
        elif name in self.state.repos:
            self._json({"error": "You already created this model repo"}, 409)
        else:
            private = asked.get("visibility") == "private" or asked.get("private") is True
            self.state.repos[name] = Repo(private)
            self._json({"url": f"{self.state.url}/{name}", "name": name})

    def _repository(self, rest: str, body: bytes) -> None:
        owner, name, *more = rest.split("/")
        repo = self.state.repos.get(f"{owner}/{name}")
        if repo is None:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif not more or more[0] == "revision":
            listed = [repo.entry(file) for file in sorted(repo.files)]
            found = {"id": f"{owner}/{name}", "private": repo.private, "sha": repo.commits[-1], "siblings": listed}
            self._json({**found, "tags": [], "downloads": 0, "likes": 0})
        elif more[0] == "tree":
            self._json([repo.entry(file) for file in sorted(repo.files)])
        elif more[0] == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
            rows = [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]
            for row in rows:
                if (body_of := repo.files.get(str(row["path"]))) is not None:
                    row["oid"] = hashlib.sha256(body_of).hexdigest() if row["path"] in repo.lfs else oid(body_of)
            self._json({"files": rows})
        elif more[0] == "commit":
            self._commit(repo, body, f"{owner}/{name}")
        else:
            self._json({"error": "no such path"}, 404)

    def _commit(self, repo: Repo, body: bytes, name: str) -> None:
        if self.state.read_only:
            self._json({"error": "no rights"}, 403)
            return
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        parent = lines[0]["value"].get("parentCommit")
        if parent is not None and parent != repo.commits[-1]:
            self._json({"error": "A commit has happened since."}, 412)
            return
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"]) + (b"x" if self.state.spoil else b"")
            elif line["key"] == "lfsFile":
                repo.files[value["path"]] = self.state.blobs[value["oid"]]
                repo.lfs.add(value["path"])
        repo.commits.append(oid(repr(sorted(repo.files.items())).encode()))
        self._json({"commitOid": repo.commits[-1], "commitUrl": f"{self.state.url}/{name}/commit/{repo.commits[-1]}"})

    def _download(self, name: str, place: str) -> None:
        repo, file = self.state.repos[name], place.partition("/")[2]
        if file not in repo.files:
            self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        body, entry = repo.files[file], repo.entry(file)
        etag = entry["lfs"]["sha256"] if "lfs" in entry else entry["oid"]
        spoil = self.state.spoilt and file.endswith(self.state.spoilt)
        self._send(body[:-1] + bytes([body[-1] ^ 1]) if spoil else body, ETag=f'"{etag}"', X_Repo_Commit=repo.commits[-1])

    def _json(self, document: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(document).encode(), status, Content_Type="application/json", **(headers or {}))

    def _send(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_POST = do_PUT = do_HEAD = do_GET
