"""Whole records or none, on a disk that is full, gone or limited."""

import logging
import os
import resource
import shutil
import signal

import pytest

from venusrl.observe.files import AppendFile, named, replace_file

from .. import disk


@pytest.fixture
def small(tmp_path):
    with disk.small_disk(tmp_path / "disk") as path:
        yield path


def test_what_a_full_disk_does_not_take_waits_and_comes_in_order(small, caplog):
    file = AppendFile(small / "a.jsonl")
    assert file.append(b"first\n")
    filler = disk.fill(small)
    big = b"x" * 9000 + b"\n"
    with caplog.at_level(logging.WARNING):
        assert not file.append(big) and not file.append(b"third\n")
    assert file.waiting == 2 and file.failures == 2 and file.lost == 0
    assert (small / "a.jsonl").read_bytes() == b"first\n"  # no part of what did not fit
    assert sum("No space left on device" in r.getMessage() for r in caplog.records) == 1  # said once
    filler.unlink()
    assert file.append(b"fourth\n")
    assert (small / "a.jsonl").read_bytes() == b"first\n" + big + b"third\nfourth\n"
    file.close()


def test_rows_that_wait_too_long_are_lost_and_counted(small, caplog):
    file = AppendFile(small / "a", waiting_bytes=25)
    disk.fill(small)
    page = 5000
    for i in range(5):
        file.append(b"%d" % i * page if i == 0 else b"%d" % i * 10)
    assert file.waiting == 2 and file.lost == 3
    with caplog.at_level(logging.WARNING):
        file.close()
    assert "5 records are missing" in caplog.text and (small / "a").read_bytes() == b""


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    file = AppendFile(tmp_path / "a")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        assert file.append(b"x" * 4000)
        assert not file.append(b"y" * 200)
        assert (tmp_path / "a").stat().st_size == 4000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert file.append(b"z")
    assert (tmp_path / "a").read_bytes() == b"x" * 4000 + b"y" * 200 + b"z"
    file.close()


def test_a_part_that_could_not_be_taken_back_goes_before_the_next_record(tmp_path, monkeypatch):
    file = AppendFile(tmp_path / "a")
    file.append(b"one\n")
    write, truncate = os.write, os.ftruncate

    def half(fd, data):
        if bytes(data[:1]) != b"w":
            raise OSError(5, "Input/output error")
        return write(fd, data[:2])

    def fails(fd, size):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", half)
    monkeypatch.setattr(os, "ftruncate", fails)
    assert not file.append(b"wo\n")
    assert (tmp_path / "a").read_bytes() == b"one\nwo"
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "ftruncate", truncate)
    assert file.append(b"three\n")
    assert (tmp_path / "a").read_bytes() == b"one\nwo\nthree\n"


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_file_that_was_removed_is_made_again(tmp_path, what, caplog):
    folder = tmp_path / "run"
    folder.mkdir()
    file = AppendFile(folder / "a", header=b"head\n")
    file.append(b"one\n")
    shutil.rmtree(folder) if what == "folder" else (folder / "a").unlink()
    with caplog.at_level(logging.WARNING):
        assert file.append(b"two\n")
    assert (folder / "a").read_bytes() == b"head\ntwo\n" and "was removed" in caplog.text
    file.close()


def test_a_file_that_cannot_be_made_names_itself(tmp_path, small):
    with pytest.raises(FileNotFoundError, match="nowhere/a"):
        AppendFile(tmp_path / "nowhere" / "a")
    disk.fill(small)
    with pytest.raises(OSError, match=r"No space left on device: .*/disk/b'"):
        AppendFile(small / "b", header=b"head")


def test_replacing_is_whole_or_not_at_all(small):
    path = small / "config.json"
    replace_file(path, b"old")
    disk.fill(small)
    with pytest.raises(OSError, match=r"No space left on device: .*/config\.json'"):
        replace_file(path, b"new" * 5000)
    assert path.read_bytes() == b"old"
    assert sorted(p.name for p in small.iterdir()) == ["config.json", "filler"]


def test_an_error_of_write_gets_the_files_name():
    error = named(OSError(28, "No space left on device"), "/a/b")
    assert str(error) == "[Errno 28] No space left on device: '/a/b'"
