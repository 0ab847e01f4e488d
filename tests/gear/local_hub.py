"""A Hugging Face hub of one data set or model repository on this machine: what is pushed to, and read."""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs

from tests.gear.served import Served

REPOSITORY_ID = "someone/corpus"
OF_DATA = f"/datasets/{REPOSITORY_ID}"


class LocalHub(Served):
    """Keeps the repository's files and what each commit changed, as the client sent them."""

    def __init__(self):
        super().__init__(_Handler)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[list[str]] = []
        self.created: list[dict] = []
        self.refuse_with: int | None = None
        self.gated: set[str] = set()
        """Repositories that nobody may read before its terms are accepted."""
        self.missing: set[str] = set()
        """Names that no repository has."""
        self.models: dict[str, dict[str, dict[str, bytes]]] = {}
        """{model: {commit: {file: content}}}; the last commit is that of main."""
        self.asked: list[str] = []
        """What was asked of files of models: `HEAD someone/model/resolve/main/config.json`."""
        self.times_main_was_asked = 0
        self.is_silent_about_main = False
        self.versions: list[dict[str, bytes]] = []
        """Files of the data set, to be streamed: main is the first of them, and from each time on that it is asked for
        the next one. Of version n the commit is n, in 40 digits."""

    @property
    def environment(self) -> dict[str, str]:
        """What makes the client talk to this hub, by plain LFS."""
        return {
            "HF_ENDPOINT": self.address,
            "HF_TOKEN": "hf_local",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "*",
        }

    def version_of(self, revision: str) -> tuple[str, dict[str, bytes]]:
        """The commit and the files of a revision of the data set that is streamed."""
        if revision != "main":
            return revision, self.versions[int(revision)]
        self.times_main_was_asked += 1
        number = min(self.times_main_was_asked, len(self.versions)) - 1
        return f"{number:040d}", self.versions[number]

    def commit(self, lines: list[dict]) -> None:
        """Apply the operations of one commit."""
        changed = []
        for line in lines:
            key, value = line["key"], line["value"]
            if key == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]
            elif key == "deletedFile":
                del self.files[value["path"]]
            if key != "header":
                changed.append(value["path"])
        self.commits.append(changed)


class _Handler(BaseHTTPRequestHandler):
    server: LocalHub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        if self.server.refuse_with:
            return self._answer({"error": "refused"}, self.server.refuse_with)
        if self.server.versions and "/paths-info/" in path:
            asked = parse_qs(body.decode())["paths"]
            return self._answer([each for each in self._listed(path) if each["path"] in asked])
        # of a model, addresses differ in one word
        path = path.replace("/api/models/", "/api/datasets/")
        path = path.replace(f"/{REPOSITORY_ID}.git", f"{OF_DATA}.git").replace("/datasets" * 2, "/datasets")
        if path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            kind = "datasets/" * (self.server.created[-1].get("type") == "dataset")
            return self._answer({"url": self._url(f"/{kind}{REPOSITORY_ID}")})
        if path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if path == f"/api/datasets/{REPOSITORY_ID}/preupload/main":
            return self._answer({"files": [_mode_of(file) for file in json.loads(body)["files"]]})
        if path == f"{OF_DATA}.git/info/lfs/objects/batch":
            objects = [self._action_of(entry) for entry in json.loads(body)["objects"]]
            return self._answer({"transfer": "basic", "objects": objects})
        if path == f"/api/datasets/{REPOSITORY_ID}/commit/main":
            self.server.commit([json.loads(line) for line in body.splitlines()])
            commit = {"commitUrl": self._url(f"/datasets/{REPOSITORY_ID}/commit/1"), "commitOid": "1" * 40}
            return self._answer(commit)
        return self._answer({"error": f"no POST {path}"}, 404)

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.objects[self.path.rpartition("/")[2]] = content
        self._answer({})

    def do_HEAD(self) -> None:
        self._answer_file()

    def _answer_file(self) -> None:
        """Answer a file, or the part that is asked for, as huggingface.co does; or the code of what is missing."""
        name, _, rest = self.path.strip("/").partition("/resolve/")
        revision, _, file = rest.partition("/")
        if self.server.versions and name == OF_DATA.strip("/"):
            commit, files = self.server.version_of(revision)
        else:
            self.server.asked.append(f"{self.command} {self.path.strip('/')}")
            if name in self.server.gated:
                return self._refuse("GatedRepo", 403)
            if (commits := self.server.models.get(name)) is None:
                return self._refuse("RepoNotFound")
            commit = list(commits)[-1] if revision == "main" else revision
            if (files := commits.get(commit)) is None:
                return self._refuse("RevisionNotFound")
        if file not in files:
            return self._refuse("EntryNotFound", **{"X-Repo-Commit": commit})
        content, status = files[file], 200
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last, size = int(asked[1]), int(asked[2] or len(content) - 1), len(content)
            content, status = content[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{first + len(content) - 1}/{size}"
        self._send(content, status, **headers)

    def do_GET(self) -> None:
        if "/resolve/" in self.path:
            return self._answer_file()
        if asked := re.match(r"/api/(?:dataset|model)s/(.+)/auth-check", self.path):
            return self._answer_access(asked[1])
        if self.server.versions and self.path.startswith(f"/api{OF_DATA}/tree/"):
            inside = self.path.partition("?")[0].partition("/tree/")[2].count("/")
            return self._refuse("EntryNotFound") if inside else self._answer(self._listed(self.path))
        if self.server.versions and re.fullmatch(rf"/api{OF_DATA}(/revision/.+)?", self.path):
            revision = self.path.partition("/revision/")[2] or "main"
            if self.server.is_silent_about_main and revision == "main":
                return self._answer({"error": "later"}, 500)
            commit, files = self.server.version_of(revision)
            siblings = [{"rfilename": name} for name in files]
            return self._answer({"id": REPOSITORY_ID, "sha": commit, "siblings": siblings})
        if re.match(rf"/api/datasets/{REPOSITORY_ID}/tree/main", self.path):
            return self._answer(self._listed(self.path))
        return self._answer({"error": f"no GET {self.path}"}, 404)

    def _listed(self, path: str) -> list[dict]:
        """The files of the data set: those of the revision in the path if it has versions, or what was pushed."""
        revision = re.split("/tree/|/paths-info/", path.partition("?")[0])[1].partition("/")[0]
        files = self.server.version_of(revision)[1] if self.server.versions else self.server.files
        return [{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in files.items()]

    def _action_of(self, entry: dict) -> dict:
        if entry["oid"] in self.server.objects:
            return entry
        return {**entry, "actions": {"upload": {"href": self._url(f"/lfs/{entry['oid']}")}}}

    def _url(self, path: str) -> str:
        return f"{self.server.address}{path}"

    def _answer_access(self, name: str) -> None:
        if name in self.server.missing:
            return self._refuse("RepoNotFound")
        if name in self.server.gated:
            return self._refuse("GatedRepo", self.server.refuse_with or 401)
        self._answer({}, self.server.refuse_with or (200 if name == REPOSITORY_ID else 404))

    def _refuse(self, code: str, status: int = 404, **headers: str) -> None:
        self._answer({"error": "refused"}, status, **{"X-Error-Code": code}, **headers)

    def _answer(self, values, status: int = 200, **headers: str) -> None:
        self._send(json.dumps(values).encode(), status, **headers)

    def _send(self, body: bytes, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_) -> None:
        """Silence."""


def _mode_of(file: dict) -> dict:
    mode = "lfs" if file["path"].endswith(".arrow") else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}
