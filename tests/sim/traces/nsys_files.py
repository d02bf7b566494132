"""Traces as Nsight Systems exports them: the same events as a Kineto trace, in the tables of an SQLite file.

Columns as in "SQLite Schema Reference" of the Nsight Systems Analysis Guide (2026.4), of each table those that a
reader may want; values of enums as ENUM_CUPTI_SYNC_TYPE and ENUM_NSYS_EVENT_TYPE of an export have them.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

DEVICE = "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
DEVICE += "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER"
SCHEMA = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "TARGET_INFO_GPU": "vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, cuDevice INTEGER",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{DEVICE}, demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_MEMCPY": f"{DEVICE}, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, srcKind INTEGER, "
    "dstKind INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": f"{DEVICE}, value INTEGER NOT NULL, bytes INTEGER NOT NULL, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": "start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, "
    "globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": f"{DEVICE}, syncType INTEGER NOT NULL, eventId INTEGER NOT NULL, "
    "eventSyncId INTEGER",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "timestamp INTEGER, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, eventId INTEGER NOT NULL, "
    "eventSyncId INTEGER",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, text TEXT, globalTid INTEGER, "
    "textId INTEGER, domainId INTEGER",
}
KERNEL, RUNTIME, NVTX, SYNC, CUDA_EVENT, MEMCPY, MEMSET = (
    "CUPTI_ACTIVITY_KIND_KERNEL",
    "CUPTI_ACTIVITY_KIND_RUNTIME",
    "NVTX_EVENTS",
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
    "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET",
)


def global_id(pid: int, tid: int = 0) -> int:
    """As Nsight serializes a process and a thread, with the machine's number above them."""
    return 1 << 48 | pid << 24 | tid


class Export:
    """Fills an export; a table is made when its first row comes, as nsys does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.db = sqlite3.connect(path)
        self.made: set[str] = set()
        self.strings: dict[str, int] = {}
        self.events = 0

    def add(self, table: str, **row: Any) -> None:
        if table not in self.made:
            self.db.execute(f"CREATE TABLE {table} ({SCHEMA[table]})")
            self.made.add(table)
        marks = ", ".join("?" * len(row))
        self.db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", list(row.values()))

    def string(self, text: str) -> int:
        if text not in self.strings:
            self.strings[text] = len(self.strings)
            self.add("StringIds", id=self.strings[text], value=text)
        return self.strings[text]

    def trace(self, content: dict[str, Any], step: str = "ProfilerStep#{}") -> None:
        """The events of a Kineto trace, but for what Nsight does not record: the collectives' groups and sizes."""
        records: dict[int, int] = {}  # correlation of a cudaEventRecord: its event
        pid = next(e["pid"] for e in content["traceEvents"] if e["cat"] == "cuda_runtime")
        waits = [e["args"] for e in content["traceEvents"] if e["cat"] == "cuda_sync"]
        for args in waits:
            self.events += 1
            record = args["wait_on_cuda_event_record_corr_id"]
            records[args["correlation"]] = records[record] = self.events
            ids = {"correlationId": record, "globalPid": global_id(pid), "eventId": 7, "eventSyncId": self.events}
            self.add(CUDA_EVENT, timestamp=0, deviceId=0, contextId=1, streamId=args["wait_on_stream"], **ids)
        for raw in content["traceEvents"]:
            self._event(raw, pid, step, records)

    def _event(self, raw: dict[str, Any], pid: int, step: str, records: dict[int, int]) -> None:
        span = {"start": round(raw["ts"] * 1000), "end": round(raw["ts"] * 1000) + round(raw["dur"] * 1000)}
        args, name = raw["args"], raw["name"]
        thread = global_id(pid, raw["tid"])
        if raw["cat"] == "kernel":
            ids = {"deviceId": args["device"], "contextId": 1, "streamId": args["stream"], "globalPid": global_id(pid)}
            named = self.string(f"{name}(Params)"), self.string(name)
            number = args["correlation"]
            self.add(KERNEL, **span, **ids, correlationId=number, demangledName=named[0], shortName=named[1])
        elif raw["cat"] == "cuda_runtime":
            ids = {"globalTid": thread, "correlationId": args["correlation"], "nameId": self.string(f"{name}_v3020")}
            self.add(RUNTIME, **span, **ids, eventClass=0, returnValue=0)
        elif raw["cat"] == "cuda_sync":
            ids = {"deviceId": 0, "contextId": 1, "streamId": args["stream"], "globalPid": global_id(pid)}
            number = args["correlation"]
            event = {"correlationId": number, "eventId": 7, "eventSyncId": records[number]}
            self.add(SYNC, **span, **ids, **event, syncType=2)
        elif found := re.match(r"ProfilerStep#(\d+)", name):
            self.add(NVTX, **span, eventType=59, text=step.format(found[1]), globalTid=thread)
        else:
            self.add(NVTX, **span, eventType=59, textId=self.string(name), globalTid=thread)

    def close(self) -> Path:
        self.add("TARGET_INFO_GPU", vmId=0, id=0, name="NVIDIA H100 80GB HBM3", cuDevice=0)
        self.db.commit()
        self.db.close()
        return self.path


def write(folder: Path, traces: Sequence[dict[str, Any]], step: str = "ProfilerStep#{}") -> list[Path]:
    """A file a rank."""
    paths = []
    for rank, content in enumerate(traces):
        export = Export(folder / f"rank{rank}.sqlite")
        export.trace(content, step)
        paths.append(export.close())
    return paths


def change(path: Path, *commands: str) -> Path:
    """Carry out SQL on a file."""
    with closing(sqlite3.connect(path)) as db:
        for command in commands:
            db.execute(command)
        db.commit()
    return path
