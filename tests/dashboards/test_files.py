"""Files are written whole or not at all, where the user meant, through no link of others."""

import os
from pathlib import Path

import pytest

from ridgeplan.dashboards.files import FileProblem, require_lockable, require_writable, write_atomically


def test_a_file_replaces_another_and_a_link_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert (target.read_text(), link.is_symlink()) == ("new", True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "target.json"]


def test_new_files_have_the_users_usual_permissions(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.write_text("")
    write_atomically(tmp_path / "written", "text")
    assert (tmp_path / "written").stat().st_mode == usual.stat().st_mode


def test_a_replaced_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "private.json"
    path.write_text("old")
    path.chmod(0o600)
    write_atomically(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)


def test_links_that_stand_ready_are_not_followed(tmp_path: Path) -> None:
    """In a folder that all users write to, such as /tmp, others can guess names from the process's id."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (f".ridgeplan-{os.getpid()}", ".ridgeplan-", ".out.json"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(tmp_path / "out.json", "text")
    assert (victim.read_text(), (tmp_path / "out.json").read_text()) == ("precious", "text")


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").touch()
    with pytest.raises(FileProblem, match=r"cannot write '.*out': Is a directory"):
        write_atomically(tmp_path / "out", "text")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "out.json", "\ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_write_would_refuse_is_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link.json").symlink_to(tmp_path / "file" / "rows.json")
    (tmp_path / ".rows.json.lock").mkdir()
    with pytest.raises(FileProblem, match=r"cannot write '.*folder': it is a folder; allowed: a file"):
        require_writable(tmp_path / "folder")
    with pytest.raises(FileProblem, match=r"cannot write '.*link\.json'"):
        require_writable(tmp_path / "link.json")
    require_writable(tmp_path / "rows.json")
    with pytest.raises(FileProblem, match=r"cannot lock '.*rows\.json': Is a directory"):
        require_lockable(tmp_path / "rows.json")
