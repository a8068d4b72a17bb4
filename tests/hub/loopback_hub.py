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

from huggingface_hub import ModelCard

TOKEN = "hf_loopback"


@dataclass
class Repository:
    """Commits of a repository, oldest first, and what its branches point to."""

    private: bool
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)

    def add(self, branch: str, files: dict[str, bytes]) -> str:
        digest = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits.append((digest, files))
        self.branches[branch] = digest
        return digest

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        return next((commit for commit in self.commits if commit[0] == self.branches.get(revision, revision)), None)

    @property
    def files(self) -> dict[str, bytes]:
        return self.at("main")[1]


class LoopbackHub:
    """The server; `with LoopbackHub() as hub:` runs it in a thread until the block ends."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}  # by id, user/name
        self.refuse = lambda path: False  # tells requests that fail, by their paths
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "LoopbackHub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Error(Exception):
    def __init__(self, status: int, message: str, code: str = "", **facts: str) -> None:
        super().__init__(message)
        self.status, self.headers, self.facts = status, {"X-Error-Message": message, "X-Error-Code": code}, facts


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path, body, headers = unquote(urlsplit(self.path).path), self._body(), {}
        with self.hub.lock:
            try:
                if self.hub.refuse(path):
                    raise _Error(403, "the stand-in was told to refuse this")
                found = [(respond, match) for route, respond in _ROUTES if (match := re.fullmatch(route, path))]
                if not found:
                    raise _Error(404, f"the stand-in knows no {self.command} {path}")
                respond, match = found[0]
                status, answer = 200, respond(self, body, **match.groupdict())
                if isinstance(answer, tuple):
                    answer, headers = answer
            except _Error as error:
                status, answer, headers = error.status, {"error": str(error)} | error.facts, error.headers
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = _answer

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size + 2)[:-2])
        self.rfile.readline()
        return b"".join(parts)

    def _is_user(self, required: bool = False) -> bool:
        is_user = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if required and not is_user:
            raise _Error(401, "log in to write")
        return is_user

    def _repository(self, repo: str, writing: bool = False) -> Repository:
        self._is_user(required=writing)
        found = self.hub.repositories.get(repo)
        if found is None or (found.private and not self._is_user()):
            raise _Error(404, "Repository not found", "RepoNotFound")
        return found

    def _commit(self, repo: str, revision: str, writing: bool = False) -> tuple[str, dict[str, bytes]]:
        commit = self._repository(repo, writing).at(revision)
        if commit is None:
            raise _Error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Answers

    def create(self, body: bytes) -> dict:
        asked = json.loads(body)
        repo = f"{asked.get('organization') or 'someone'}/{asked['name']}"
        url = f"{self.hub.url}/{repo}"
        if repo in self.hub.repositories:
            raise _Error(409, "You already created this model repo", url=url)
        self._is_user(required=True)
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.hub.repositories[repo] = repository = Repository(private)
        repository.add("main", {".gitattributes": b""})
        return {"url": url, "name": repo}

    def validate_card(self, body: bytes) -> dict:
        return {"errors": [], "warnings": []}

    def listing(self, body: bytes) -> list[dict]:
        """Answer a search by tags, those of the base models among them, and by a word of the name."""
        asked = parse_qs(urlsplit(self.path).query)
        found = []
        for repo in self.hub.repositories:
            files = self._repository(repo).files
            card = ModelCard(files["README.md"].decode()).data.to_dict() if "README.md" in files else {}
            bases = card.get("base_model", [])
            named = [bases] if isinstance(bases, str) else bases
            tags = {*card.get("tags", ()), *(f"base_model:{base}" for base in named)}
            if tags.issuperset(asked.get("filter", ())) and asked.get("search", [""])[0] in repo:
                found.append(self.info(body, repo) | {"tags": sorted(tags), "downloads": 7})
        return found

    def branch(self, body: bytes, repo: str, branch: str) -> dict:
        branches = self._repository(repo, writing=True).branches
        if branch in branches:
            raise _Error(409, "Reference already exists")
        branches[branch] = branches["main"]
        return {}

    def info(self, body: bytes, repo: str, revision: str = "main") -> dict:
        digest, files = self._commit(repo, revision)
        siblings = [{"rfilename": name} for name in sorted(files)]
        private = self._repository(repo).private
        return {"id": repo, "modelId": repo, "sha": digest, "private": private, "siblings": siblings, "tags": []}

    def tree(self, body: bytes, repo: str, revision: str) -> list:
        files = sorted(self._commit(repo, revision)[1].items())
        return [{"type": "file", "path": name, "size": len(content), "oid": "0" * 40} for name, content in files]

    def preupload(self, body: bytes, repo: str, revision: str) -> dict:
        self._commit(repo, revision, writing=True)
        names = [file["path"] for file in json.loads(body)["files"]]
        return {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}

    def commit(self, body: bytes, repo: str, revision: str) -> dict:
        files = dict(self._commit(repo, revision, writing=True)[1])
        for item in map(json.loads, body.splitlines()):
            if item["key"] == "file":
                files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
            elif item["key"] == "deletedFile":
                files.pop(item["value"]["path"], None)
        digest = self._repository(repo).add(revision, files)
        return {"commitUrl": f"{self.hub.url}/{repo}/commit/{digest}", "commitOid": digest}

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> tuple[bytes, dict[str, str]]:
        digest, files = self._commit(repo, revision)
        if path not in files:
            raise _Error(404, f"{path} is not in this repository", "EntryNotFound")
        return files[path], {"X-Repo-Commit": digest, "ETag": f'"{hashlib.sha256(files[path]).hexdigest()}"'}


_REPO = r"(?P<repo>[^/]+/[^/]+)"
_ROUTES = (
    (r"/api/repos/create", _Handler.create),
    (r"/api/validate-yaml", _Handler.validate_card),
    (r"/api/models", _Handler.listing),
    (rf"/api/models/{_REPO}/branch/(?P<branch>.+)", _Handler.branch),
    (rf"/api/models/{_REPO}", _Handler.info),
    (rf"/api/models/{_REPO}/revision/(?P<revision>.+)", _Handler.info),
    (rf"/api/models/{_REPO}/tree/(?P<revision>[^/]+)", _Handler.tree),
    (rf"/api/models/{_REPO}/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    (rf"/api/models/{_REPO}/commit/(?P<revision>[^/]+)", _Handler.commit),
    (rf"/{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
)
