"""A stand-in for the Hugging Face Hub on the loopback interface: what pushing, listing and loading models needs of it.

Real HTTP for huggingface_hub's own client. Repositories are kept in memory, all files as small ones; a write needs
the token, and so does reading a private repository.
"""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_loopback"


@dataclass
class Repository:
    """Commits of a repository, oldest first, and what its branches point to."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, files: dict[str, bytes]) -> str:
        """Commit files to a branch; returns the id."""
        digest = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits.append((digest, files))
        self.branches[branch] = digest
        return digest

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit that a branch or an id names."""
        return next((commit for commit in self.commits if commit[0] == self.branches.get(revision, revision)), None)

    @property
    def files(self) -> dict[str, bytes]:
        """What the main branch holds."""
        return self.at("main")[1]


class LoopbackHub:
    """The server; `with LoopbackHub() as hub:` runs it in a thread until the block ends.

    Attributes:
        repositories (`dict[str, Repository]`): By id, `user/name`.
        refuse (`Callable[[str, str], bool]`): Tells requests that fail, by method and path.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.refuse = lambda method, path: False
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "LoopbackHub":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Error(Exception):
    def __init__(self, status: int, message: str, code: str | None = None, **facts: str) -> None:
        super().__init__(message)
        self.status, self.code, self.facts = status, code, facts


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        body = self._body()
        with self.hub.lock:
            try:
                if self.hub.refuse(self.command, path):
                    raise _Error(403, "the stand-in was told to refuse this")
                for method, pattern, respond in _ROUTES:
                    match = re.fullmatch(pattern, path)
                    if match and self.command in method:
                        return self._send(200, *respond(self, body, parse_qs(url.query), **match.groupdict()))
                raise _Error(404, f"the stand-in knows no {self.command} {path}")
            except _Error as error:
                headers = {"X-Error-Message": str(error)} | ({"X-Error-Code": error.code} if error.code else {})
                self._send(error.status, json.dumps({"error": str(error)} | error.facts).encode(), headers)

    do_GET = do_HEAD = do_POST = _answer

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    # What is there

    def _is_known_user(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _require_user(self) -> None:
        if not self._is_known_user():
            raise _Error(401, "log in to write")

    def _repository(self, repo: str) -> Repository:
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and not self._is_known_user()):
            raise _Error(404, "Repository not found", "RepoNotFound")
        return found

    def _commit(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
        commit = self._repository(repo).at(revision)
        if commit is None:
            raise _Error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Answers

    def create(self, body: bytes, query: dict) -> tuple[bytes]:
        self._require_user()
        asked = json.loads(body)
        repo = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        url = f"{self.hub.url}/{repo}"
        if repo in self.hub.repositories:
            raise _Error(409, "You already created this model repo", url=url)
        self.hub.repositories[repo] = Repository(bool(asked.get("private")) or asked.get("visibility") == "private")
        self.hub.repositories[repo].add("main", {".gitattributes": b""})
        return (json.dumps({"url": url, "name": repo}).encode(),)

    def whoami(self, body: bytes, query: dict) -> tuple[bytes]:
        self._require_user()
        return (json.dumps({"type": "user", "name": "someone", "orgs": []}).encode(),)

    def validate_card(self, body: bytes, query: dict) -> tuple[bytes]:
        return (json.dumps({"errors": [], "warnings": []}).encode(),)

    def branch(self, body: bytes, query: dict, repo: str, branch: str) -> tuple[bytes]:
        self._require_user()
        repository = self._repository(repo)
        if branch in repository.branches:
            raise _Error(409, "Reference already exists")
        repository.branches[branch] = repository.branches["main"]
        return (b"{}",)

    def info(self, body: bytes, query: dict, repo: str, revision: str = "main") -> tuple[bytes]:
        digest, files = self._commit(repo, revision)
        siblings = [{"rfilename": name} for name in sorted(files)]
        private = self._repository(repo).private
        answer = {"id": repo, "modelId": repo, "sha": digest, "private": private, "siblings": siblings, "tags": []}
        return (json.dumps(answer).encode(),)

    def tree(self, body: bytes, query: dict, repo: str, revision: str) -> tuple[bytes]:
        _, files = self._commit(repo, revision)
        entries = [_entry(name, content) for name, content in sorted(files.items())]
        return (json.dumps(entries).encode(),)

    def paths_info(self, body: bytes, query: dict, repo: str, revision: str) -> tuple[bytes]:
        _, files = self._commit(repo, revision)
        asked = json.loads(body)["paths"]
        return (json.dumps([_entry(name, files[name]) for name in asked if name in files]).encode(),)

    def preupload(self, body: bytes, query: dict, repo: str, revision: str) -> tuple[bytes]:
        self._require_user()
        modes = [
            {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
            for file in json.loads(body)["files"]
        ]
        return (json.dumps({"files": modes}).encode(),)

    def commit(self, body: bytes, query: dict, repo: str, revision: str) -> tuple[bytes]:
        self._require_user()
        _, before = self._commit(repo, revision)
        files = dict(before)
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "deletedFile":
                files.pop(value["path"], None)
        digest = self._repository(repo).add(revision, files)
        answer = {"commitUrl": f"{self.hub.url}/{repo}/commit/{digest}", "commitOid": digest}
        return (json.dumps(answer).encode(),)

    def resolve(self, body: bytes, query: dict, repo: str, revision: str, path: str) -> tuple[bytes, dict[str, str]]:
        digest, files = self._commit(repo, revision)
        headers = {"X-Repo-Commit": digest}
        if path not in files:
            raise _Error(404, f"{path} is not in this repository", "EntryNotFound")
        return files[path], headers | {"ETag": f'"{hashlib.sha256(files[path]).hexdigest()}"'}


def _entry(name: str, content: bytes) -> dict:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_ROUTES = (
    ("POST", r"/api/repos/create", _Handler.create),
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/validate-yaml", _Handler.validate_card),
    ("POST", rf"/api/models/{_REPO}/branch/(?P<branch>.+)", _Handler.branch),
    ("GET", rf"/api/models/{_REPO}", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/revision/(?P<revision>.+)", _Handler.info),
    ("GET", rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)", _Handler.tree),
    ("POST", rf"/api/models/{_REPO}/paths-info/(?P<revision>[^/]+)", _Handler.paths_info),
    ("POST", rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    ("POST", rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)", _Handler.commit),
    ("GET HEAD", rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
)
