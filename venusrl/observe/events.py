"""TensorBoard's event files, written record by record, so that a run that is killed leaves every step.

The format is TFRecord: length (uint64), its masked CRC-32C, an Event of TensorBoard's protocol, its masked CRC-32C.
"""

import os
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import masked_crc32c

from venusrl.observe.files import AppendFile


def record(event: Event) -> bytes:
    """An event as it stands in a file."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


def scalars(step: int, values: Mapping[str, float], wall_time: float) -> bytes:
    """A record with the values of a step."""
    event = Event(step=step, wall_time=wall_time)
    for tag, value in values.items():
        event.summary.value.add(tag=tag, simple_value=value)
    return record(event)


def read_events(path: str | os.PathLike) -> Iterator[tuple[int, Event]]:
    """(offset after it, event) of every whole event; ends at a part of one, or a damaged one."""
    data, at = Path(path).read_bytes(), 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + size + 4
        body = data[at + 12 : end - 4]
        if end > len(data) or struct.unpack_from("<I", data, end - 4)[0] != masked_crc32c(body):
            return
        try:
            event = Event.FromString(body)
        except DecodeError:
            return
        yield end, event
        at = end


class EventFile:
    """The scalars of a run, in one file a start. Going on from step k drops what is after k."""

    def __init__(self, folder: Path, resume_step: int, rows: Iterable[tuple[int, Mapping[str, float]]], now: float):
        """Args:
          rows: (step, values) that must be there; what a run that was killed left out is added.
          now: seconds since the epoch.

        Raises:
          OSError: naming the file.
        """
        folder.mkdir(parents=True, exist_ok=True)
        known: dict[int, set[str]] = defaultdict(set)
        for path in sorted(folder.glob("events.out.tfevents.*")):
            for event in _keep(path, resume_step):
                known[event.step].update(value.tag for value in event.summary.value)
        header = record(Event(wall_time=now, file_version="brain.Event:2"))
        # TensorBoard reads files in the order of their names.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{int(now % 1 * 1e9):09d}"
        self.file = AppendFile(folder / name, header)
        # A TensorBoard that shows the run forgets what it has seen beyond.
        restart = SessionLog(status=SessionLog.START)
        self.file.append(record(Event(step=max(0, resume_step + 1), wall_time=now, session_log=restart)))
        for step, values in rows:
            if missing := {tag: value for tag, value in values.items() if tag not in known[step]}:
                self.add(step, missing, now)

    def add(self, step: int, values: Mapping[str, float], now: float) -> None:
        """The values of a step; a number that is not finite stays what it is."""
        self.file.append(scalars(step, values, now))

    def close(self) -> None:
        self.file.close()


def _keep(path: Path, resume_step: int) -> Iterator[Event]:
    """The events of a file up to a step; takes away what comes after."""
    end = 0
    for after, event in read_events(path):
        if event.summary.value and event.step > resume_step:
            break
        yield event
        end = after
    if end < path.stat().st_size:
        os.truncate(path, end)
