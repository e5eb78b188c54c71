"""A timeline: what a reader of Chrome's format sees of it."""

import json

import pytest

from venusrl.observe.trace import Trace, read_trace

from .. import disk


def spans(events, process):
    pid = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == process)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid}
    return [
        (tracks[e["tid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6)
        for e in events
        if e["ph"] == "X" and e["pid"] == pid
    ]


def test_slots_and_trajectories_have_tracks_of_their_own(tmp_path):
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        trace.generated("a", "w0", 1.0, 3.0, 8, "stop")
        trace.generated("b", "w0", 2.0, 4.0, 8, "preempted")  # beside it
        trace.tool("a", "tool", 3.0, 5.0)
        trace.waited("c", 2.0, 3.0)
        trace.waited("c", 3.0, 3.0)  # it did not wait
        trace.generated("c", "w0", 3.0, 6.0, 8, "length")  # after the first
        trace.published(1, 6.0, 6.5)
    events = read_trace(path)
    assert spans(events, "w0") == [("slot 0", "a", 1, 2), ("slot 1", "b", 2, 2), ("slot 0", "c", 3, 3)]
    assert spans(events, "trajectories") == [
        ("a", "generate", 1, 2),
        ("b", "generate", 2, 2),
        ("a", "tool", 3, 2),
        ("c", "wait", 2, 1),
        ("c", "generate", 3, 3),
    ]
    assert spans(events, "training") == [("weights", "version 1", 6, 0.5)]
    whole = json.loads(path.read_text().rstrip().rstrip(",") + "]")
    assert whole == events


def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    path = tmp_path / "trace.json"
    with Trace(path) as trace:
        for i in range(5):
            trace.tool("a", "tool", i, i + 1)
    whole = read_trace(path)
    path.write_text(path.read_text()[:-20])
    assert read_trace(path) == whole[:-1]


def test_a_full_disk_leaves_spans_out_and_the_file_readable(tmp_path):
    with disk.small_disk(tmp_path / "disk") as small:
        with Trace(small / "t.json") as trace:
            trace.tool("g0/0", "tool", 1.0, 2.0)
            filler = disk.fill(small)
            for i in range(200):
                trace.tool("g0/0", "tool", float(i), i + 0.5)
            filler.unlink()
            trace.tool("g0/0", "last", 999.0, 1000.0)
        names = [event["name"] for event in read_trace(small / "t.json")]
        assert names[-1] == "last" and len(names) < 200


def test_a_trace_that_cannot_be_begun_names_its_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere/t\.json"):
        Trace(tmp_path / "nowhere" / "t.json")
