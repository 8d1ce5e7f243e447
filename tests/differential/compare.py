"""Whether ranks have computed what the reference has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Optional

import numpy
import source

# Tolerances as parts of the largest value of a tensor (or of 0.1): differences by the order of sums, over at most 24
# steps of optimizers that divide by roots of squares. Rounding units are 1.1e-16, 6e-8, 4e-3 and 5e-4.
BOUNDS = {"float64": 1e-5, "float32": 1e-3, "bfloat16": 0.2, "float16": 0.2}
# Replicas that differ by more are noticed: half of a type's digits, and something.
DRIFT = {"float64": 1e-6, "float32": 1e-2, "bfloat16": 0.3, "float16": 0.2}
LATE = ("Timeout", "PeerLost", "HorovodInternalError", "Internal")
SAME_PARAMETERS = {"ddp", "sharded", "hvd", "chainermn"}  # differing replicas are noticed


@dataclass
class Verdict:
    kind: str  # same, refused, different
    text: str = ""
    step: int = -1


def types_of(program: dict[str, Any]) -> set[str]:
    return {program["dtype"], *(event["to"] for event in program["events"] if event["kind"] == "cast")}


def bound_of(program: dict[str, Any]) -> float:
    types = types_of(program)
    if program["options"].get("compression") or "16" in str(program["options"].get("hook")):
        types.add("bfloat16")
    if any(event["kind"] == "cast_and_back" for event in program["events"]):
        types.add("float32" if program["dtype"] == "float64" else program["dtype"])
    return max(BOUNDS[one] for one in types)


def refusal(error: dict[str, Any]) -> str:
    """An error's text without what differs between programs."""
    text = re.sub(r"'[\w.]*'", "'...'", error["text"].split("\n")[0])
    text = re.sub(r"0x[0-9a-f.]+(p[+-]?\d+)?", "N", text)
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?|\bnan\b|\binf\b", "N", text)
    return f"{error['type']}: {text[:230]}"


def first_difference(ours: tuple[Any, Any], theirs: tuple[Any, Any], bound: float, only: str = "") -> Optional[str]:
    """In words. only: "parameters", or all."""
    if ours[0] != theirs[0]:
        mine, other = [set(one[0]) for one in (ours, theirs)]
        return f"other tensors: {sorted(mine - other)[:2]} in place of {sorted(other - mine)[:2]}"
    if only == "" and numpy.array_equal(ours[1], theirs[1], equal_nan=True):
        return None
    begin = 0
    for name, count, dtype, parameter in ours[0]:
        a, b = ours[1][begin : begin + count], theirs[1][begin : begin + count]
        begin += count
        if only == "parameters" and not parameter or numpy.array_equal(a, b, equal_nan=True):
            continue
        if dtype.startswith(("int", "bool")):
            return f"'{name}' is {a.tolist()[:3]}, not {b.tolist()[:3]}"
        finite = numpy.isfinite(b)
        if dtype.startswith("complex") and not finite.all():
            continue  # a product with a complex infinity is NaN where a quotient is not
        if not numpy.array_equal(finite, numpy.isfinite(a)):
            return f"'{name}' is {'not ' if finite.all() else ''}finite: {a[:3].tolist()}, not {b[:3].tolist()}"
        if not finite.any():
            continue
        scale = max(0.1, float(numpy.abs(b[finite]).max()))
        off = float(numpy.abs(a[finite] - b[finite]).max())
        if off > bound * scale:
            at = int(numpy.abs(numpy.where(finite, a - b, 0)).argmax())
            return f"'{name}' [{at}] is {a[at]:.9g}, not {b[at]:.9g}"
    return None


def steps_to_notice(program: dict[str, Any], state: Any) -> int:
    """After so many more steps, replicas that differ have been refused."""
    if program["method"] in ("hvd", "chainermn"):  # one part of the weights each time; a part that is NaN on all hides it
        broken = any(event.get("how") in ("nan", "inf") for event in program["events"])
        return 1 + 20 * (sum(one[3] for one in state[0]) if broken else 1)
    return 1 + -(-sum(one[3] for one in state[0]) // 8)


def verdict(program: dict[str, Any], reference: list[Any], replies: list[Optional[dict[str, Any]]]) -> Verdict:
    """reference: each replica's records. replies: each rank's; None: none came in time."""
    phases = source.phases_of(program)
    if "virtual" in program:  # after a step each rank has what virtual rank 0's replica has
        reference = reference[:1] * len(replies)
    alone = any(event.get("how", event["kind"]).endswith("_one") for event in program["events"])
    silent = [rank for rank, reply in enumerate(replies) if reply is None]
    if silent and alone:
        return Verdict("refused late", f"nothing, within seconds: {len(silent)} ranks wait")
    if silent:
        return Verdict("different", f"no answer from rank {silent}: it hangs or has died")
    replies = replies[: max(phases)]
    errors = [reply["error"] for reply in replies if reply]
    failed = [error for error in errors if error]
    if failed:
        skips = any(event.get("how") == "skip_one" for event in program["events"])  # that rank is a step behind from then on
        if alone and (skips or any(error["type"] in LATE for error in failed)):
            return Verdict("refused late", refusal(failed[0]))
        ranks = phases[failed[0]["phase"]]
        if len(failed) < ranks and alone and all("(synchronize)" in refusal(error) for error in failed):
            return Verdict("refused", refusal(failed[0]))  # by LocalSGD, without an exchange where no step was taken since
        if len(failed) < ranks:
            who = [rank for rank, error in enumerate(errors) if error]
            return Verdict("different", f"refused on ranks {who} only, of {ranks}: {refusal(failed[0])}")
        for error in failed:
            if error["type"] in LATE or not error["own"]:
                return Verdict("different", f"fails on all ranks, and one by {refusal(error)} (first: {refusal(failed[0])})")
    if "virtual" in program:
        replies = replies[: min(phases)]  # the others leave records out
        wanted = program.get("refused")
        if wanted is not None and (not failed or any(len(reply["states"]) > wanted for reply in replies)):
            return Verdict("different", f"not refused after {wanted} records")
    bound = bound_of(program)
    for rank, reply in enumerate(replies):
        states = reference[rank].states
        for step, (ours, theirs) in enumerate(zip(reply["states"], states)):
            found = first_difference(ours, theirs, bound)
            if found:
                return Verdict("different", f"rank {rank}, record {step}: {found}", step)
        if not failed and len(reply["states"]) != len(states):
            return Verdict("different", f"rank {rank} has {len(reply['states'])} records, not {len(states)}")
    return differing(program, reference, replies, bool(failed)) or (
        Verdict("refused", refusal(failed[0]), min(len(reply["states"]) for reply in replies)) if failed else Verdict("same"))


def other_bits(replies: list[Any], there: list[Any], phases: list[int]) -> Optional[str]:
    """The difference between rank 0 here and ranks of another number that have the same virtual ranks, in words."""
    if any(reply is None for reply in there):
        return "no answer"
    whole = there[: min(phases)]  # the others leave records out
    for rank, reply in enumerate(whole):
        if bool(reply["error"]) != bool(replies[0]["error"]) or len(reply["states"]) != len(replies[0]["states"]):
            error = reply["error"] and refusal(reply["error"])
            return f"rank {rank} has {len(reply['states'])} records in place of {len(replies[0]['states'])}, error: {error}"
        for step, (ours, theirs) in enumerate(zip(reply["states"], replies[0]["states"])):
            if found := first_difference(ours, theirs, 0.0):
                return f"rank {rank}, record {step}: {found}"
    return None


def differing(program: dict[str, Any], reference: list[Any], replies: list[Any], refused: bool) -> Optional[Verdict]:
    """Replicas that differ where they should not, or unnoticed."""
    ranks, method = min(program["ranks"], len(replies)), program["method"]
    first, last = None, -1  # where the program makes them differ
    drift = max(DRIFT[one] for one in types_of(program))
    for step in range(min(len(reply["states"]) for reply in replies[:ranks])):
        apart = [first_difference(reference[rank].states[step], reference[0].states[step], 0.0, "parameters") for rank in range(ranks)]
        here = [first_difference(replies[rank]["states"][step], replies[0]["states"][step], 0.0, "parameters") for rank in range(ranks)]
        for rank in range(ranks):
            if here[rank] and not apart[rank]:
                return Verdict("different", f"record {step}: rank {rank} differs from rank 0: {here[rank]}", step)
        if any(first_difference(reference[rank].states[step], reference[0].states[step], drift, "parameters") for rank in range(ranks)):
            first, last = step if first is None else first, step
        else:
            first = None
    if first is None or refused or method not in SAME_PARAMETERS or len(set(source.phases_of(program))) > 1:
        return None
    steps = last + 1
    if steps - first > steps_to_notice(program, replies[0]["states"][first]):
        return Verdict("different", f"replicas differ from record {first} on (the program makes them), and {steps - first} steps later "
                       "nobody has said so", first)  # fmt: skip
    return None
