"""Programs are taken where they are complete; what is missing is said in one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cluster.programs import NAMES, ProgramsMissing, find, find_or_build


def folder_with(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """Make a folder with programs that do nothing."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is installed, built or named."""
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_nothing_is_found_on_a_bare_machine() -> None:
    """Then they have to be built."""
    assert find() is None


def test_the_named_folder_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before `PATH`."""
    folder_with(tmp_path / "path")
    assets = folder_with(tmp_path / "assets")
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    assert find() == assets


def test_a_named_folder_that_lacks_one_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever names a folder means it."""
    assets = folder_with(tmp_path / "assets", NAMES[:-2])
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    with pytest.raises(ProgramsMissing, match="has no kube-controller-manager and no kubectl"):
        find_or_build()


def test_a_folder_of_the_path_must_have_them_all(tmp_path: Path) -> None:
    """A kubectl alone, which many machines have, is no control plane."""
    folder = folder_with(tmp_path / "path", ("kubectl",))
    assert find() is None
    for name in NAMES:
        (folder / name).touch(mode=0o755)
    assert find() == folder


def test_a_build_that_fails_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And leaves nothing that looks finished."""
    go = folder_with(tmp_path / "path", ("go",)) / "go"
    go.write_text('#!/bin/sh\n[ "$1" = env ] && echo go99.0 && exit\nexit 3\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}/usr/bin{os.pathsep}/bin")
    with pytest.raises(ProgramsMissing, match=r"ended with 3.*set KUBEBUILDER_ASSETS"):
        find_or_build()
    assert find() is None
