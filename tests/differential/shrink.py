"""Makes a program that fails smaller, as long as it fails."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

PLAIN = {"kind": "SGD", "options": {"lr": 0.1}, "groups": "one"}


def simpler(program: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One thing less each, the largest first."""

    def variant(**changed: Any) -> dict[str, Any]:
        return {**copy.deepcopy(program), **changed}

    events = program["events"]
    half = len(events) // 2
    for begin, end in ((half, len(events)), (0, half)):
        if half > 1:
            yield variant(events=events[:begin] + events[end:])
    for number in reversed(range(len(events))):
        yield variant(events=events[:number] + events[number + 1 :])
    for ranks, hosts in ((1, ""), (2, ""), (2, "2"), (3, "")):
        if (ranks, bool(hosts)) < (program["ranks"], bool(program["hosts"])) and (hosts == "" or program["hosts"]):
            count = program.get("virtual", ranks)
            fewer = [event for event in events if event.get("rank", 0) < count]
            yield variant(ranks=ranks, hosts=hosts, sizes=program["sizes"][:count],
                          events=[{**e, "ranks": min(e["ranks"], ranks)} if e["kind"] == "resume" else e for e in fewer])  # fmt: skip
    for number in range(len(program["pieces"])):
        if len(program["pieces"]) > 1:
            yield variant(pieces=program["pieces"][:number] + program["pieces"][number + 1 :])
    for name in program["options"]:
        if name not in ("sharding", "sync_every", "op", "named", "hook", "outer_learning_rate", "outer_momentum", "fragments"):
            yield variant(options={key: value for key, value in program["options"].items() if key != name})
    for name, plain in (("optimizer", PLAIN), ("schedule", None), ("scaler", False), ("ema", False), ("second_model", False),
                        ("seeded_by_rank", False), ("set_to_none", True), ("sizes", [3] * len(program["sizes"]))):  # fmt: skip
        if program[name] != plain:
            yield variant(**{name: plain})
    for number, piece in enumerate(program["pieces"]):
        for change in ({"kind": "Linear", "name": piece["name"]}, {k: v for k, v in piece.items() if k not in ("frozen", "off")}):
            if change != piece:
                yield variant(pieces=[*program["pieces"][:number], change, *program["pieces"][number + 1 :]])
    for number, event in enumerate(events):
        if event["kind"] == "step" and event["how"] != "plain":
            yield variant(events=[*events[:number], {"kind": "step", "how": "plain"}, *events[number + 1 :]])


def shrink(program: dict[str, Any], fails: Callable[[dict[str, Any]], bool], seconds: float) -> dict[str, Any]:
    """The smallest that was found in this time."""
    until = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for smaller in simpler(program):
            if time.monotonic() > until:
                return program
            if smaller["events"] and smaller["pieces"] and fails(smaller):
                program, found = smaller, True
                break
    return program
