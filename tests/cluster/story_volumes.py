"""What a kubelet mounts into the agent's pod of a story: ConfigMaps and a bound token, as files."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.api import Api
from tests.fakes.pods import Json


class PodVolumes:
    """The volumes of one pod, each a folder below `root`."""

    def __init__(self, api: Api, pod: Json, root: Path) -> None:
        self._api = api
        self._pod = pod
        self._root = root
        self._tokens: dict[str, str] = {}
        self._namespace = f"/api/v1/namespaces/{pod['metadata']['namespace']}"

    def mount(self) -> None:
        """Bring every folder up to date, as a kubelet does about once a minute."""
        for volume in self._pod["spec"].get("volumes", []):
            if (files := self._files(volume)) is not None:
                _write_volume(self._folder(volume["name"]), files)

    def here(self, argument: str) -> str:
        """Replace a path in the container by the folder that stands for it here."""
        flag, equals, value = argument.partition("=")
        for mount in self._pod["spec"]["containers"][0].get("volumeMounts", []):
            path = mount["mountPath"]
            if value == path or value.startswith(f"{path}/"):
                return f"{flag}{equals}{self._folder(mount['name'])}{value.removeprefix(path)}"
        return argument

    def _folder(self, name: str) -> Path:
        folder = self._root / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _files(self, volume: Json) -> dict[str, str] | None:
        """Return what is in a volume; None for kinds that begin empty."""
        if "configMap" in volume:
            return self._config_map(volume["configMap"])
        if "projected" not in volume:
            return None
        files: dict[str, str] = {}
        for source in volume["projected"]["sources"]:
            if "serviceAccountToken" in source:
                files |= self._token(source["serviceAccountToken"])
            elif "configMap" in source:
                files |= self._config_map(source["configMap"])
        return files

    def _config_map(self, source: Json) -> dict[str, str]:
        answer = self._api.request("GET", f"{self._namespace}/configmaps/{source['name']}")
        assert answer.ok or source.get("optional"), f"{source['name']}: {answer.message}"
        data: dict[str, str] = answer.body.get("data") or {} if answer.ok else {}
        if "items" not in source:
            return data
        return {item["path"]: data[item["key"]] for item in source["items"] if item["key"] in data}

    def _token(self, source: Json) -> dict[str, str]:
        """Ask for a token once; it lasts longer than a test."""
        path = source["path"]
        if path not in self._tokens:
            self._tokens[path] = self._request_token(source)
        return {path: self._tokens[path]}

    def _request_token(self, source: Json) -> str:
        metadata, spec = self._pod["metadata"], self._pod["spec"]
        bound = {
            "kind": "Pod",
            "apiVersion": "v1",
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {
                "audiences": [source["audience"]] if "audience" in source else [],
                "expirationSeconds": source.get("expirationSeconds", 3600),
                "boundObjectRef": bound,
            },
        }
        path = f"{self._namespace}/serviceaccounts/{spec['serviceAccountName']}/token"
        answer = self._api.request("POST", path, body)
        assert answer.ok, answer.message
        return str(answer.body["status"]["token"])


def _write_volume(folder: Path, files: Mapping[str, str]) -> None:
    """Write files as a kubelet does: all of them change at once, by one renamed link."""
    now = {path.name: path.read_text() for path in folder.iterdir() if path.name[:2] != ".."}
    if now == files and files:
        return
    data, old = folder / "..data", None
    if data.is_symlink():
        old = data.resolve()
    fresh = folder / f"..{time.time_ns()}"
    fresh.mkdir()
    for name, text in files.items():
        (fresh / name).write_text(text)
    link = folder / "..data_tmp"
    link.symlink_to(fresh.name)
    link.rename(data)
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    for name in now:
        if name not in files:
            (folder / name).unlink()
    if old is not None:
        shutil.rmtree(old)
