"""Draws programs from seeds: a program is a dict of plain values, which `source` writes as Python.

The grammar is written from torch's API. It does not make:
  GPUs, several devices: the hosts that run it have none, and the fake ones have no kernels;
  SyncBatchNorm: its statistics are those of all ranks, so that a replica's forward depends on the others';
  LBFGS: its line search compares losses, which every rank has of its own batch;
  fused optimizers, torch.compile, quantised layers: other arithmetic, which no bound that follows from types holds;
  16 bits with Sharded: it steps in float32, which plain torch does not;
  hooks of users on gradients (Tensor.register_hook): they see a rank's own gradient in some wrappers and the mean in others;
  Adasum, PipelineParallel, tensor-parallel layers, elastic worlds, hvd.elastic: a rank's replica is not the whole training there;
  LocalSGD and DiLoCo with a wire format: differences of parameters are rounded, and no gradients are recorded there;
  a list of modules for DiLoCo: its fragments are cut by numbers of parameters here;
  groups of parameters that do not have all of them, hooks of optimizers: a plain optimizer with those trains the same;
  Sharded: gradients that are kept over a step, and relative writes to parameters that ranks share, both of which it says it does
  not have;
  random seeds that change between forward and backward: no wrapper sees them;
  virtual ranks with a second model, changes on one rank alone, or parameters that the first forward makes: a rank is not a replica there;
  virtual ranks with non_finite: after a step that is refused a rank's buffers are its own until the next forward;
  virtual ranks with sharding, join, a sampler, GPUs, or parameters that come within a step: what those refuse has tests of its own.
"""

from __future__ import annotations

import random
from typing import Any

Program = dict[str, Any]

# Worlds that stay up: ranks, and the hosts that they are taken to be on ("": one).
WORLDS = [(2, ""), (2, "2"), (3, "2,1"), (4, "2,2"), (1, ""), (3, ""), (4, "3,1"), (4, "")]
METHODS = {"ddp": 8, "sharded": 5, "local_sgd": 3, "diloco": 3, "hvd": 4, "chainermn": 2, "torch_ddp": 2}
PIECES = {
    "Linear": 8, "BatchNorm": 4, "LayerNorm": 2, "Dropout": 2, "Tanh": 4, "GELU": 1, "Conv": 2, "Words": 1, "Gate": 2,
    "Scale": 2, "Tied": 2, "Recurrent": 1, "Attention": 1, "Spectral": 1, "WeightNorm": 1, "Again": 1, "Lazy": 0.3,
    "Late": 0.5, "Complex": 0.3,
}  # fmt: skip


def pick(draw: random.Random, weights: dict[str, float]) -> str:
    return draw.choices(list(weights), list(weights.values()))[0]


def program(seed: int, method: str = "", world: int = -1) -> Program:
    draw = random.Random(seed)
    ranks, hosts = WORLDS[world] if world >= 0 else draw.choices(WORLDS, [4, 4, 4, 2, 1, 2, 2, 1])[0]
    method = method or pick(draw, METHODS)
    dtype = draw.choices(["float64", "float32", "bfloat16", "float16"], [6, 4, 0.5, 0.3])[0]
    if method == "sharded" and dtype in ("bfloat16", "float16"):
        dtype = "float32"
    made: Program = {
        "seed": seed, "ranks": ranks, "hosts": hosts, "method": method, "dtype": dtype,
        "seeded_by_rank": draw.random() < 0.4, "pieces": pieces_of(draw), "optimizer": optimizer_of(draw, dtype),
        "set_to_none": draw.random() < 0.8, "options": {}, "sizes": [3] * ranks,
    }  # fmt: skip
    optimizer = made["optimizer"]
    if optimizer["kind"] != "SGD" and any(piece["kind"] == "BatchNorm" for piece in made["pieces"]):
        if dtype == "float32":
            optimizer["options"]["eps"] = 1e-2
        elif dtype == "float64" and "weight_decay" in optimizer["options"]:
            optimizer["options"]["eps"] = 1e-3  # decay lets what rounding leaves grow in each step
    if draw.random() < 0.25:
        made["sizes"] = [draw.randint(2, 5) for _ in range(ranks)]
    made["options"] = options_of(draw, made)
    for piece in made["pieces"]:
        if method == "torch_ddp" and piece["kind"] == "Late":
            piece["unmade"] = False  # torch's wrapper takes its list once, and averages nothing of what is made later
    made["schedule"] = draw.choices([None, "StepLR", "ExponentialLR", "CosineAnnealingLR", "LambdaLR", "OneCycleLR", "Plateau"],
                                    [6, 1, 1, 1, 1, 1, 0.3])[0]  # fmt: skip
    made["scaler"] = dtype in ("float32", "float64") and draw.random() < 0.12
    if made["options"].get("context"):
        made["scaler"] = False  # it leaves steps out, so that ranks synchronise at different ones, which its page says
    made["ema"] = draw.random() < 0.12
    made["second_model"] = draw.random() < 0.1 and (
        method in ("ddp", "sharded", "local_sgd", "hvd") and not is_lossy(made))  # its averages are not recorded
    made["events"] = events_of(draw, made)
    later = {event["to"] for event in made["events"] if event["kind"] == "cast"} - {"float64"}
    if later and optimizer["kind"] != "SGD":  # as of a program that begins in that type
        optimizer["options"]["eps"] = max(optimizer["options"].get("eps", 0.0), 0.1 if later - {"float32"} else 1e-2)
    make_virtual(random.Random(f"virtual {seed}"), made)
    return made


def replicas(made: Program) -> int:
    return made.get("virtual", made["ranks"])


# Steps with virtual ranks. (The others act on one rank alone, or pass by the wrapper; "twice" is two virtual ranks
# to it, without a sampler, and "retain" is refused, at once by all ranks only where each has as many.)
VIRTUAL_STEPS = ("plain", "accumulate", "clip", "clip_value", "nan", "inf", "skip", "keep", "validate", "no_batch", "zero_before",
                 "reassign_grad", "clip_weights", "drop_gradient", "step_twice", "grad_zeros", "penalty", "new_output", "autocast",
                 "two_forwards", "forward_only")  # fmt: skip


def make_virtual(draw: random.Random, made: Program) -> None:
    """Gives some programs virtual ranks: the reference has a replica for each, and the ranks train blocks of them."""
    options = made["options"]
    if made["method"] != "ddp" or draw.random() < 0.6 or made["second_model"] or "non_finite" in options:
        return
    refused = bool(options.get("hook") or options.get("wire_format"))
    if "broadcast_buffers" in options:
        refused |= any(piece["kind"] in ("BatchNorm", "Scale") for piece in made["pieces"])
        if not refused:
            return  # allowed, until a buffer is added
    if refused and draw.random() < 0.8:
        return
    virtual = made["virtual"] = draw.randint(made["ranks"], 5)
    if not refused and made["ranks"] > 1 and draw.random() < 0.05:
        refused, virtual = True, made["ranks"] - 1
        made["virtual"] = virtual
    made["sizes"] = [draw.randint(2, 5) if "weighted" in options else 3 for _ in range(virtual)]
    made["schedule"] = None if made["schedule"] == "Plateau" else made["schedule"]  # by a rank's own loss
    for piece in made["pieces"]:
        if piece.get("off") == "rank":
            piece["off"] = "nobody"
        piece["unmade"] = False
    made["events"] = [event for event in made["events"]
                      if not event["kind"].endswith("_one") and event["kind"] not in ("gate", "train_the_copy")]  # fmt: skip
    if refused:
        made["refused"] = 0
    steps = [event for event in made["events"] if event["kind"] == "step"]
    same_blocks = virtual % made["ranks"] == 0 and all(event["kind"] != "resume" for event in made["events"])
    for number, event in enumerate(steps):
        if event["how"] == "retain" and same_blocks:
            made.setdefault("refused", number)
        elif event["how"] not in VIRTUAL_STEPS:
            event["how"] = "plain"
    for event in made["events"]:
        if "rank" in event:
            event["rank"] = draw.randrange(virtual)


def elsewhere(made: Program) -> list[Program]:
    """The program on other numbers of ranks, which give the same bits, or refuse it at the same step."""
    virtual, refused = made["virtual"], made.get("refused")
    numbers = [ranks for ranks in (1, 2, 3) if ranks <= virtual and (ranks, "") != (made["ranks"], made["hosts"])]
    if refused == 0:
        return []
    if refused is not None:
        numbers = [ranks for ranks in numbers if virtual % ranks == 0]
    return [{**made, "ranks": ranks, "hosts": "",
             "events": [{**e, "ranks": min(ranks, e["ranks"])} if e["kind"] == "resume" else e for e in made["events"]]}
            for ranks in (numbers if len(numbers) < 3 else numbers[:: len(numbers) - 1])]  # fmt: skip


def pieces_of(draw: random.Random) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = [{"kind": "Linear"}]
    for _ in range(draw.randint(1, 4)):
        pieces.append({"kind": pick(draw, PIECES)})
    if draw.random() < 0.1:
        pieces.insert(0, {"kind": "Words", "sparse": draw.random() < 0.5})
    for piece in pieces[1:]:
        if piece["kind"] == "Words":
            piece.setdefault("sparse", draw.random() < 0.5)
        if piece["kind"] == "Gate":
            piece["off"] = draw.choice(["nobody", "rank", "rank", "all"])
        if piece["kind"] in ("Lazy", "Late"):
            piece["unmade"] = draw.random() < 0.3
        if draw.random() < 0.12:
            piece["frozen"] = True
    pieces.append({"kind": "Linear"})
    for number, piece in enumerate(pieces):
        piece["name"] = f"p{number}"
    return pieces


def optimizer_of(draw: random.Random, dtype: str) -> dict[str, Any]:
    kind = draw.choices(["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"], [5, 2, 2, 1, 1])[0]
    options: dict[str, Any] = {"lr": draw.choice([0.1, 0.03, 0.01]) if kind == "SGD" else draw.choice([0.01, 0.003])}
    if kind == "SGD" and draw.random() < 0.6:
        options["momentum"] = 0.9
        if draw.random() < 0.3:
            options["nesterov"] = True
        elif draw.random() < 0.2:
            options["dampening"] = 0.1
    if draw.random() < 0.3:
        options["weight_decay"] = 0.01
    if kind in ("Adam", "AdamW") and draw.random() < 0.2:
        options["amsgrad"] = True
    if kind == "RMSprop" and draw.random() < 0.3:
        options["centered"] = True
    if kind in ("SGD", "Adam", "AdamW", "RMSprop") and draw.random() < 0.2:
        options["foreach"] = draw.random() < 0.5
    if kind != "SGD" and dtype != "float64":
        # A gradient that is zero but for rounding (a bias before BatchNorm) is not to count.
        options["eps"] = 1e-3 if dtype == "float32" else 0.1
    # All tensors in one group, weights and biases in two, or only those that are trained when it is made.
    groups = draw.choices(["one", "two", "trained"], [6, 3, 1])[0]
    return {"kind": kind, "options": options, "groups": groups}


def options_of(draw: random.Random, made: Program) -> dict[str, Any]:
    """Options of the wrapper."""
    method, options = made["method"], {}
    lossy = draw.choice(["bfloat16", "int8", "int4"]) if draw.random() < 0.2 else None
    uneven = len(set(made["sizes"])) > 1
    if method == "ddp":
        if draw.random() < 0.4:
            options["bucket_bytes"] = draw.choice([64, 256, 1024])
            options["first_bucket_bytes"] = draw.choice([64, 256])
        if draw.random() < 0.15:
            options["broadcast_buffers"] = False
        if draw.random() < 0.15:
            options["non_finite"] = "raise"
        if draw.random() < 0.15:
            options["compare_parameters_every"] = draw.choice([1, 3])
        if draw.random() < 0.3:
            options["hook"] = draw.choice(["allreduce", "bf16_compress", "fp16_compress", "int8_compress", "int4_compress",
                                           "powerSGD"])  # fmt: skip
            options["feedback"] = draw.choice([None, True, False])
        elif lossy:
            options["wire_format"] = lossy
            options["error_feedback"] = draw.choice([None, True, False]) if lossy != "bfloat16" else None
        if uneven and draw.random() < 0.6:
            options["weighted"] = draw.choice(["set_sample_count", "samples"])
    elif method == "sharded":
        options["sharding"] = draw.choice(["optimizer", "gradients", "parameters"])
        if draw.random() < 0.3:
            options["bucket_bytes"] = draw.choice([64, 256])
        if uneven and draw.random() < 0.5:
            options["weighted"] = "set_sample_count"
    elif method in ("local_sgd", "diloco"):
        options["sync_every"] = draw.choice([1, 2, 3, 4])
        options["context"] = method == "local_sgd" and draw.random() < 0.4
        if method == "diloco":
            options["fragments"] = draw.choice([1, 1, 2])
            options["sync_every"] *= options["fragments"]
            apart = options["sync_every"] // options["fragments"]
            options["fragment_sync_delay"] = draw.choice([0, 0, apart - 1])
            options["fragment_update_alpha"] = draw.choice([0.0, 0.0, 0.5])
            options["outer_learning_rate"] = draw.choice([0.7, 1.0])
            options["outer_momentum"] = draw.choice([0.9, 0.0])
        elif draw.random() < 0.2:
            options["warm_up_steps"] = draw.choice([1, 2])
        if not options["context"] and uneven and draw.random() < 0.5:
            options["weighted"] = "step"
    elif method == "hvd":
        options["op"] = draw.choices(["Average", "Sum"], [6, 1])[0]
        if draw.random() < 0.2:
            options["groups"] = draw.choice([1, 2])
        if options["op"] == "Average" and draw.random() < 0.2:
            options["gradient_predivide_factor"] = 2.0
        if draw.random() < 0.3:
            options["backward_passes_per_step"] = 2
        if draw.random() < 0.3:
            options["sparse_as_dense"] = True
        if draw.random() < 0.2:
            options["compression"] = draw.choice(["fp16", "bf16"])
        if draw.random() < 0.15:
            options["non_finite"] = "raise"
        if uneven and options["op"] == "Average" and "backward_passes_per_step" not in options and draw.random() < 0.5:
            options["average_by"] = "samples"
        options["named"] = draw.random() < 0.8
    elif method == "chainermn":
        if draw.random() < 0.2:
            options["double_buffering"] = True
        if draw.random() < 0.2:
            options["zero_fill"] = False
    elif method == "torch_ddp":
        if draw.random() < 0.5:
            options["hook"] = draw.choice(["allreduce", "bf16_compress", "fp16_compress", "int8_compress", "int4_compress",
                                           "powerSGD"])  # fmt: skip
            options["feedback"] = draw.choice([None, True, False])
            if options["hook"] == "bf16_compress":  # torch takes no hook of this name without NCCL
                options["hook"] = "fp16_compress"
        if draw.random() < 0.4:
            options["bucket_cap_mb"] = 0.0002
        if draw.random() < 0.3:
            options["gradient_as_bucket_view"] = True
    return options


def events_of(draw: random.Random, made: Program) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    changes = draw.randint(0, 3)
    steps = draw.randint(4, 8) + (16 if made["method"] == "hvd" and draw.random() < 0.15 else 0)
    for step in range(steps):
        while changes and step and draw.random() < 0.35:
            changes -= 1
            events.append(change_of(draw, made))
        events.append(step_of(draw, made))
    while changes:
        changes -= 1
        events.insert(draw.randint(1, len(events) - 1), change_of(draw, made))
    if draw.random() < 0.1 and made["method"] != "torch_ddp":
        at = draw.randint(1, len(events) - 1)
        events.insert(at, {"kind": "resume", "ranks": draw.randint(1, made["ranks"]), "by": draw.choice(["torch", "folder"])})
    return events


def step_of(draw: random.Random, made: Program) -> dict[str, Any]:
    event: dict[str, Any] = {"kind": "step"}
    method, ranks = made["method"], made["ranks"]
    some = draw.randrange(ranks)
    kind = draw.choices(
        ["plain", "accumulate", "twice", "clip", "clip_value", "nan", "skip", "skip_one", "two_forwards", "penalty", "retain",
         "validate", "closure", "drop_gradient", "drop_gradient_one", "no_batch", "keep", "zero_before", "inf", "reassign_grad",
         "clip_weights", "write_one", "direct", "step_twice", "autocast", "grad_zeros", "forward_only", "freeze_between", "new_output",
         "freeze_after"],
        [22, 3, 2, 3, 1, 1.5, 1.5, 0.4, 1, 1, 1, 1, 0.5, 0.7, 0.3, 1.5, 1, 1, 1, 0.5, 0.7, 0.3, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7,
         0.7, 0.7])[0]  # fmt: skip
    if kind == "skip_one" and method not in ("ddp", "local_sgd", "diloco") and draw.random() < 0.8:
        kind = "plain"  # others wait for that rank until a timeout: rarely, since it costs seconds
    if kind == "skip_one" and made["options"].get("context"):
        kind = "plain"  # LocalSGD counts that rank's steps: it averages a step later, and the others wait, which lockstep is not
    if kind in ("nan", "inf") and method in ("local_sgd", "diloco") and draw.random() < 0.7:
        kind = "plain"  # the next synchronisation refuses what it leaves, which ends the program
    event["how"] = kind
    if kind in ("nan", "inf", "skip_one", "drop_gradient_one", "no_batch", "write_one"):
        event["rank"] = some
    if kind == "accumulate":
        event["passes"] = draw.choice([2, 3])
    if made["options"].get("backward_passes_per_step"):
        event["passes"] = 2
    if kind in ("drop_gradient", "drop_gradient_one", "grad_zeros", "freeze_between", "freeze_after"):
        event["piece"] = draw.choice(made["pieces"])["name"]
    return event


def change_of(draw: random.Random, made: Program) -> dict[str, Any]:
    kind = pick(draw, {
        "freeze": 2, "thaw": 3, "cast": 2, "cast_and_back": 1.5, "reassign_data": 1.5, "reload": 2, "reload_assign": 1,
        "replace": 1.5, "append": 1.5, "add_group": 2, "rate": 1.5, "rate_one": 0.8, "epoch": 1, "eval": 0.7, "gate": 1.5,
        "channels_last": 0.5, "reload_optimizer": 1.5, "new_optimizer": 1, "wrap_again": 1, "write": 0.7, "decay_one": 0.3,
        "momentum": 0.5, "share_memory": 0.3, "deepcopy": 0.5, "save_on_cpu": 1, "tie": 0.7, "untie": 0.5, "buffer": 0.7,
        "train_the_copy": 0.5, "set_gradients": 0.5, "set_buffer": 0.5,
    })  # fmt: skip
    fixed = made["method"] in ("sharded", "local_sgd", "diloco")
    if fixed and kind in ("thaw", "replace", "append", "untie", "reload_assign", "cast") and draw.random() < 0.7:
        kind = "rate"  # these refuse another model, which ends the program
    event: dict[str, Any] = {"kind": kind}
    if kind in ("freeze", "thaw", "replace", "reassign_data", "gate", "tie", "untie"):
        event["piece"] = draw.choice(made["pieces"])["name"]
    if kind == "cast":
        event["to"] = draw.choice(["float32", "float64", "float64", "bfloat16", "float16"])
    if kind == "cast_and_back":
        event["to"] = draw.choice(["float16", "bfloat16", "float64"])
    if kind in ("rate_one", "decay_one", "gate"):
        event["rank"] = draw.randrange(made["ranks"])
    if kind == "reload":
        event["by"] = draw.choice(["net", "model"])
        event["unsaid"] = draw.random() < 0.3  # without a call of parameters_written
    if kind in ("replace", "append", "thaw"):
        event["optimizer"] = draw.choice(["add_group", "new", "nothing"]) if kind != "thaw" else draw.choice(["as_is", "add_group"])
    return event


LOSSY_HOOKS = ("int8_compress", "int4_compress", "powerSGD")


def is_lossy(made: Program) -> bool:
    """Whether averages are rounded in a way that only bounds describe."""
    options = made["options"]
    return options.get("hook") in LOSSY_HOOKS or bool(options.get("wire_format"))
