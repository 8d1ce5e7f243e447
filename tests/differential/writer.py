"""The lines of a program: building, wrapping and a step; `source` has what happens between steps."""

from __future__ import annotations

from typing import Any, Optional

from pieces import CLASSES, MAKES, SECOND

HOOKS_WITH_STATE = ("int8_compress", "int4_compress")


def arguments(options: dict[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in options.items())


def p_complex(program: dict[str, Any]) -> bool:
    return any(piece["kind"] == "Complex" for piece in program["pieces"])


class Writer:
    def __init__(self, program: dict[str, Any], reference: bool) -> None:
        self.p, self.reference = program, reference
        self.method, self.options = program["method"], program["options"]
        self.virtual = program.get("virtual", 0)
        self.lines: list[str] = []
        self.indent = 1
        self.t = self.phase = 0
        self.dtype = program["dtype"]
        self.extra = 0
        self.training = True
        self.exchanged = False  # this step has had a forward
        self.replaced = False  # parameters were, since the last forward of the wrapper
        self.schedule = program["schedule"]
        self.uses_scaler = program["scaler"] and self.method in ("ddp", "local_sgd", "diloco", "hvd", "chainermn", "torch_ddp")
        self.divided = self.method == "sharded" and self.options["sharding"] != "optimizer"

    # -------------------------------------------------------------------------------------------- lines

    def both(self, *lines: str) -> None:
        self.lines += ["    " * self.indent + line for line in lines]

    def ours(self, *lines: str) -> None:
        if not self.reference:
            self.both(*lines)

    def rule(self, *lines: str) -> None:
        """For the reference alone."""
        if self.reference:
            self.both(*lines)

    def rank_only(self, rank: int, *lines: str) -> None:
        if max(self.p["ranks"], self.virtual) > rank:
            self.both(f"if rank == {rank}:", *("    " + line for line in lines))

    # -------------------------------------------------------------------------------------------- the whole

    def text(self) -> str:
        kinds = {piece["kind"] for piece in self.p["pieces"]}
        head = [CLASSES[kind].strip("\n") + "\n\n" for kind in CLASSES if kind in kinds]
        self.indent = 0
        self.net_class()
        self.begin_phase()
        for number, event in enumerate(self.p["events"]):
            if self.virtual:  # generators are those of ranks here, and of replicas there
                self.both(f"torch.manual_seed({number})")
            self.replaced |= event["kind"] in ("replace", "append", "reload_assign", "untie")
            getattr(self, "on_" + event["kind"])(event)
        self.end()
        return "\n".join([*head, *self.lines]) + "\n"

    def net_class(self) -> None:
        self.both("class Net(nn.Module):", "    def __init__(self):", "        super().__init__()")
        linear = next((one["name"] for one in self.p["pieces"] if one["kind"] == "Linear"), None)
        for piece in self.p["pieces"]:
            name, kind = piece["name"], piece["kind"]
            make = MAKES.get(kind) or (f"Words(sparse={piece['sparse']})" if kind == "Words" else "Gate()")
            self.both(f"        self.{name} = {make}")
            if kind == "Tied" and linear is not None:
                self.both(f"        self.{name}.weight = self.{linear}.weight")
        seeded = ["    seed = 0", "", "    def forward(self, x):", "        torch.manual_seed(self.seed)"]
        self.both("", *(seeded if self.virtual else ["    def forward(self, x):"]), "        for piece in self.children():", "            x = piece(x)",
                  "        return x", "")  # fmt: skip

    def begin_phase(self) -> None:
        self.indent = 0
        self.both(f"def phase_{self.phase}(rank, size):")
        self.indent = 1
        seed = self.p["seed"] % 1000 + self.phase
        self.both(f"torch.manual_seed({seed}{' + 100 * rank' if self.p['seeded_by_rank'] else ''})")
        if self.dtype == "float64":
            self.both("torch.set_default_dtype(torch.float64)")
        cast = f".to(torch.{self.dtype})" if self.dtype in ("bfloat16", "float16") else ""
        self.both(f"net = Net(){cast}")
        for piece in self.p["pieces"]:
            if piece.get("frozen"):
                self.both(f"net.{piece['name']}.requires_grad_(False)")
            if piece.get("off"):
                on = {"nobody": "True", "rank": "rank != size - 1", "all": "False"}[piece["off"]]
                self.both(f"net.{piece['name']}.on = {on}")
        if self.p["second_model"]:
            self.both(f"net2 = {SECOND}{cast}")
        if self.phase and self.by == "torch":
            self.both("saved = torch.load(folder + '/saved.pt', weights_only=False)", "net.load_state_dict(saved['net'])")
        if any(piece["kind"] in ("Lazy", "Late") and not piece.get("unmade") for piece in self.p["pieces"]):
            self.both("with torch.no_grad():", f"    net(torch.zeros(2, 8, dtype=torch.{self.dtype}))")
        self.held_names()
        if self.method in ("local_sgd", "diloco", "hvd", "chainermn"):
            self.make_optimizer()
            self.wrap()
        else:
            self.wrap()
            self.make_optimizer()
        if self.p["second_model"]:
            self.second()
        if self.uses_scaler:
            self.both("scaler = torch.amp.GradScaler('cpu', init_scale=256.0, growth_interval=2)")
        if self.phase:
            self.load()
        self.make_schedule()
        if self.p["ema"]:
            self.both("ema = copy.deepcopy(net)")
        self.both("snapshot = copy.deepcopy(net.state_dict())")

    def held_names(self) -> None:
        only = " if p.requires_grad" if self.p["optimizer"]["groups"] == "trained" else ""
        self.both(f"held = [p for p in net.parameters(){only}]")

    def groups_text(self) -> str:
        if self.p["optimizer"]["groups"] != "two":
            return "held"
        return "[{'params': [p for p in held if p.dim() > 1]}, {'params': [p for p in held if p.dim() <= 1], 'lr': 0.02}]"

    def make_optimizer(self) -> None:
        kind, options = self.p["optimizer"]["kind"], arguments(self.p["optimizer"]["options"])
        if self.method == "sharded" and not self.reference:
            self.both(f"optimizer = cohort.optim.Sharded(model, torch.optim.{kind}, {self.groups_text()}{options})")
        else:
            self.both(f"optimizer = torch.optim.{kind}({self.groups_text()}{options})")

    def make_schedule(self) -> None:
        made = {
            "StepLR": "StepLR(optimizer, 2, 0.5)", "ExponentialLR": "ExponentialLR(optimizer, 0.8)",
            "CosineAnnealingLR": "CosineAnnealingLR(optimizer, 6)", "LambdaLR": "LambdaLR(optimizer, lambda n: 1 / (1 + n))",
            "OneCycleLR": "OneCycleLR(optimizer, 0.1, total_steps=40, cycle_momentum=False)",
            "Plateau": "ReduceLROnPlateau(optimizer, patience=0, threshold=0.1)",
        }.get(self.schedule)  # fmt: skip
        if made:
            self.both(f"schedule = torch.optim.lr_scheduler.{made}")

    # -------------------------------------------------------------------------------------------- wrappers

    def wrap(self, net: str = "net", model: str = "model", key: int = 0) -> None:
        getattr(self, "wrap_" + self.method)(net, model, key)
        self.rule(f"model{'' if key == 0 else 2} = {net}")
        self.rule(f"yield 'wrap', {key}, {net}, optimizer{'' if key == 0 else 2}" if self.method in (
            "local_sgd", "diloco", "hvd", "chainermn") else f"yield 'wrap', {key}, {net}, None")  # fmt: skip

    def wrap_ddp(self, net: str, model: str, key: int) -> None:
        own = {name: value for name, value in self.options.items() if name not in ("hook", "feedback", "weighted", "sharding")}
        if self.virtual:
            own["virtual_ranks"] = self.virtual
        if self.method == "sharded":
            own["sharding"] = self.options["sharding"]
        if "bucket_bytes" in own:  # C++'s name
            own["bucket_cap_mb"] = own.pop("bucket_bytes") / 2**20
        samples = ", samples=lambda x: len(x)" if self.options.get("weighted") == "samples" else ""
        self.ours(f"{model} = cohort.nn.DistributedDataParallel({net}, world{arguments(own)}{samples})")
        self.hook(model)

    wrap_sharded = wrap_ddp

    def wrap_torch_ddp(self, net: str, model: str, key: int) -> None:
        own = {name: value for name, value in self.options.items() if name not in ("hook", "feedback")}
        self.ours(f"{model} = nn.parallel.DistributedDataParallel({net}, process_group=group, find_unused_parameters=True"
                  f"{arguments(own)})")  # fmt: skip
        self.hook(model)

    def hook(self, model: str) -> None:
        hook = self.options.get("hook")
        if not hook:
            return
        state = "group" if self.method == "torch_ddp" else "None"
        if hook == "powerSGD":
            more = arguments({"matrix_approximation_rank": 1, "start_powerSGD_iter": 2,
                              "use_error_feedback": self.options.get("feedback") is not False})  # fmt: skip
            state = f"comm_hooks.PowerSGDState({state}{more})"
        elif hook in HOOKS_WITH_STATE:
            state = f"comm_hooks.WireState({state}, error_feedback={self.options.get('feedback')!r})"
        name = hook + "_hook"
        self.ours(f"{model}.register_comm_hook({state}, comm_hooks.{name})")

    def wrap_local_sgd(self, net: str, model: str, key: int) -> None:
        own = {name: value for name, value in self.options.items() if name not in ("context", "weighted")}
        kind = "LocalSGD" if self.method == "local_sgd" else "DiLoCo"
        local, optimizer = ("local", "optimizer") if key == 0 else ("local2", "optimizer2")
        self.ours(f"{local} = cohort.optim.{kind}({net}, {optimizer}{arguments(own)}, comm=world)")
        if self.options.get("context"):
            self.ours(f"contexts.enter_context({local})")
        self.ours(f"{model} = {net}")

    wrap_diloco = wrap_local_sgd

    def wrap_hvd(self, net: str, model: str, key: int) -> None:
        optimizer = "optimizer" if key == 0 else "optimizer2"
        o = self.options
        own = {name: o[name] for name in ("backward_passes_per_step", "gradient_predivide_factor", "groups", "sparse_as_dense",
                                          "non_finite", "average_by") if name in o}  # fmt: skip
        names = ", named_parameters=[(f'{prefix}{n}', p) for n, p in NET.named_parameters()]"
        names = names.replace("NET", net).replace("{prefix}", f"{net}.") if o["named"] or key else ""
        compression = f", compression=hvd.Compression.{o['compression']}" if o.get("compression") else ""
        self.ours(f"hvd.broadcast_parameters({net}.state_dict(), 0, ranks)",
                  f"{optimizer} = hvd.DistributedOptimizer({optimizer}{names}, op=hvd.{o['op']}, process_set=ranks"
                  f"{arguments(own)}{compression})",
                  f"{model} = {net}")  # fmt: skip

    def wrap_chainermn(self, net: str, model: str, key: int) -> None:
        self.ours(f"optimizer = chainermn.create_multi_node_optimizer(optimizer, communicator{arguments(self.options)})"
                  f".setup({net})", f"{model} = {net}")  # fmt: skip

    def second(self) -> None:
        """A second model with an optimizer of its own, which is stepped after the first."""
        if self.method in ("local_sgd", "hvd"):
            self.both("optimizer2 = torch.optim.SGD(net2.parameters(), lr=0.05, momentum=0.9)")
            self.wrap("net2", "model2", 1)
            return
        self.wrap("net2", "model2", 1)
        if self.method == "sharded":
            self.ours("optimizer2 = cohort.optim.Sharded(model2, torch.optim.SGD, lr=0.05, momentum=0.9)")
            self.rule("optimizer2 = torch.optim.SGD(net2.parameters(), lr=0.05, momentum=0.9)")
        else:
            self.both("optimizer2 = torch.optim.SGD(net2.parameters(), lr=0.05, momentum=0.9)")

    # -------------------------------------------------------------------------------------------- phases

    by = "torch"

    def on_resume(self, event: dict[str, Any]) -> None:
        self.by = "folder" if self.method == "sharded" or event["by"] == "folder" else "torch"
        if self.method in ("hvd", "chainermn", "local_sgd", "diloco"):
            self.by = "torch"
        if self.method in ("local_sgd", "diloco"):
            self.ours("local.synchronize()")
            self.rule("yield 'synchronize', 0, net, optimizer")
        save = "torch.save({'net': net.state_dict(), 'optimizer': optimizer.state_dict()}, folder + '/saved.pt')"
        if self.by == "torch":
            self.both("if rank == 0:", "    " + save)
        else:
            self.ours(f"cohort.checkpoint.CheckpointFolder(folder, comm=world).save(model, optimizer, step={self.t})")
            self.rule("if rank == 0:", "    " + save)
        self.end()
        self.phase += 1
        self.schedule = None
        self.begin_phase()

    def load(self) -> None:
        if self.by == "torch":
            self.both("optimizer.load_state_dict(saved['optimizer'])")
        else:
            self.ours("cohort.checkpoint.CheckpointFolder(folder, comm=world).load_latest(model, optimizer)")
            self.rule("saved = torch.load(folder + '/saved.pt', weights_only=False)", "net.load_state_dict(saved['net'])",
                      "optimizer.load_state_dict(saved['optimizer'])")  # fmt: skip
        self.both(f"torch.manual_seed({self.p['seed'] % 77} + rank)")

    def end(self) -> None:
        if self.method in ("local_sgd", "diloco"):
            self.ours("local.synchronize()")
            self.rule("yield 'synchronize', 0, net, optimizer")
            self.both("record(net)")
        self.rule("yield 'end', 0, net, None")

    # -------------------------------------------------------------------------------------------- a step

    def forward(self, x: str = "x", key: int = 0) -> None:
        """`out` is the model's."""
        net, model = ("net", "model") if key == 0 else ("net2", "model2")
        if self.how == "direct" and key == 0:
            self.both(f"out = {net}({x})")  # not by way of the wrapper, which broadcasts nothing then
            return
        if not (self.virtual and self.exchanged):
            self.rule(f"yield 'forward', {key}, {net}, None")
        self.exchanged, self.replaced = True, False
        if self.options.get("weighted") == "set_sample_count":
            self.ours(f"{model}.set_sample_count(len({x}))")
        if self.how == "autocast" and key == 0:
            self.both("with torch.autocast('cpu', dtype=torch.bfloat16):", f"    out = {model}({x})")
            return
        self.both(f"out = {model}({x})")

    how = ""

    def weight(self) -> str:
        weighted = self.options.get("weighted") or self.options.get("average_by")
        return "seen" if weighted else "1"

    def backward(self, loss: str = "loss", more: str = "", key: int = 0) -> None:
        """Synchronising. `seen` counts the samples of the step."""
        scaled = f"scaler.scale({loss})" if self.uses_scaler and key == 0 else loss
        line = f"{scaled}.backward({more})"
        if self.options.get("non_finite") == "raise" and self.method in ("ddp", "sharded") and not self.reference:
            self.both("try:", "    " + line, "except cohort.nn.NonFiniteError:", "    pass")
        else:
            self.both(line)
        if self.method in ("ddp", "sharded", "torch_ddp"):
            self.synchronise(key)

    def synchronise(self, key: int = 0) -> None:
        """The reference's average."""
        net = "net" if key == 0 else "net2"
        self.rule(f"yield 'gradients', {key}, {net}, {self.weight()}")
        if key == 0 and not self.divided:
            self.both("record_gradients(net)")

    def on_step(self, event: dict[str, Any]) -> None:
        how, passes = event["how"], event.get("passes", 1)
        rank = event.get("rank")
        if rank is not None and rank >= max(self.p["ranks"], self.virtual):
            how, rank = "plain", None
        if how == "no_batch" and (self.method not in ("ddp", "sharded") or self.options.get("hook") or self.uses_scaler):
            how = "plain"
        if self.method in ("hvd", "torch_ddp") and how in ("twice", "retain", "two_forwards", "penalty", "keep", "zero_before"):
            how = "plain"  # Horovod refuses more backward passes than were said, torch another forward before a backward
        if how == "keep" and self.divided:
            how = "plain"  # divided gradients end with the step
        if how in ("direct", "forward_only") and (self.method == "torch_ddp" or self.options.get("weighted")):
            how = "plain"  # nothing there says how many samples a forward has; torch's does not allow it
        if how in ("forward_only", "freeze_between", "freeze_after") and self.method == "torch_ddp":
            how = "plain"
        if how == "step_twice" and self.method in ("hvd", "chainermn"):
            how = "plain"  # its second step averages again
        self.how = how
        if how == "direct" and self.replaced:
            how = self.how = "plain"  # the wrapper has not seen those, and nothing tells it of them
        if how == "closure" and (self.method != "ddp" or self.uses_scaler or self.p["optimizer"]["kind"] != "SGD"
                                 or self.options.get("non_finite")):  # fmt: skip
            how = "plain"
        if how == "accumulate" and (self.method == "torch_ddp" or self.method == "hvd" and "backward_passes_per_step" not in self.options):
            passes = 1  # Horovod refuses more passes than were said
        self.both(f"# step {self.t}")
        if how == "zero_before":
            self.both("optimizer.zero_grad()")
        self.exchanged = False
        if self.virtual:
            begin, end = [f"(rank{one}) * ({self.virtual} // size) + min(rank{one}, {self.virtual} % size)" for one in ("", " + 1")]
            self.ours(f"for rank in range({begin}, {end}):")
            self.indent += not self.reference
            self.both(f"net.seed = {100 * self.t} + rank")
        self.both(f"x, y = batch({self.t}, rank, {self.p['sizes']}[rank], torch.{self.dtype})", "seen = len(x)")
        if how in ("nan", "inf"):
            self.rank_only(rank, f"x[0, 0] = float('{how}')")
        if how == "forward_only":
            self.forward()
        if how == "validate":
            self.both("model.eval()", "with torch.no_grad():", "    model(x)", f"model.train({self.training})")
        if self.options.get("average_by"):
            self.ours("optimizer.set_sample_count(len(x))")
        if how == "no_batch":
            self.without_batch(rank)
            self.block_ends()
            self.both("optimizer.step()")
        elif how == "closure":
            self.closure()
        else:
            self.passes(how, passes, event)
            self.block_ends()
            if how == "freeze_after" and any(piece["name"] == event["piece"] for piece in self.p["pieces"]):
                self.both(f"net.{event['piece']}.requires_grad_(False)")
            self.update(how, event, rank)
        if how != "keep":
            # hvd has no such argument's effect; Sharded drops gradients whatever it says.
            none = "" if self.p["set_to_none"] or self.method in ("hvd", "sharded") else "set_to_none=False"
            self.both(f"optimizer.zero_grad({none})")
        if self.p["ema"]:
            self.both("with torch.no_grad():", "    for mean, p in zip(ema.parameters(), net.parameters()):",
                      "        mean.lerp_(p.to(mean.dtype), 0.1)")  # fmt: skip
        if self.p["second_model"]:
            self.second_step()
        self.both("record(net" + (", ema" if self.p["ema"] else "") + (", net2" if self.p["second_model"] else "") + ")")
        self.t += 1

    def block_ends(self) -> None:
        """The rank has trained its virtual ranks."""
        if self.virtual:
            self.indent -= not self.reference
            self.ours("rank = world.rank()")

    def passes(self, how: str, passes: int, event: dict[str, Any]) -> None:
        for number in range(passes):
            if number:
                self.both(f"x, y = batch({self.t} + 0.{number}, rank, {self.p['sizes']}[rank], torch.{self.dtype})",
                          "seen += len(x)")  # fmt: skip
            local = number + 1 < passes and self.method in ("ddp", "sharded")
            if local:
                self.ours("with model.no_sync():")
                self.rule("if True:")
                self.indent += 1
                if self.method == "ddp":  # (with virtual ranks a step's first forward exchanges buffers, of whatever kind it is)
                    first = self.virtual and not self.exchanged
                    self.rule(f"yield '{'' if first else 'local_'}forward', 0, net, None")
                self.exchanged = True
                if self.options.get("weighted") == "set_sample_count":
                    self.ours("model.set_sample_count(len(x))")
                self.both("out = model(x)")
                loss = f"((out - y) ** 2).mean() / {passes}"
                self.both(f"scaler.scale({loss}).backward()" if self.uses_scaler else f"({loss}).backward()")
                self.indent -= 1
                continue
            self.forward()
            self.both("loss = ((out - y) ** 2).mean()" + (f" / {passes}" if passes > 1 else ""))
            if how == "two_forwards":
                self.forward("x * 0.5")
                self.both("loss = loss + ((out - y) ** 2).mean()")
            if how == "new_output":
                self.both("loss = loss + (out.detach() * out).mean()")
            if how == "freeze_between" and any(piece["name"] == event["piece"] for piece in self.p["pieces"]):
                self.both(f"net.{event['piece']}.requires_grad_(False)")
            if how == "penalty":
                self.both("loss = loss + 0.01 * sum((p.abs() ** 2).sum() for p in net.parameters() if p.requires_grad)")
            if how == "retain":
                self.backward(more="retain_graph=True")
            self.backward()
            if how == "twice":
                self.forward("x * 0.5")
                self.both("loss = ((out - y) ** 2).mean()")
                self.backward()

    def without_batch(self, rank: Optional[int]) -> None:
        self.rule("yield 'forward', 0, net, None")
        self.both(f"if rank == {rank}:")
        self.ours("    model.step_without_samples()")
        self.rule("    seen = 0")
        self.both("else:")
        self.indent += 1
        if self.options.get("weighted") == "set_sample_count":
            self.ours("model.set_sample_count(len(x))")
        self.both("loss = ((model(x) - y) ** 2).mean()")
        catch = self.options.get("non_finite") == "raise" and not self.reference
        self.both("loss.backward()")
        self.indent -= 1
        if catch:
            pass  # a batch without NaN: nothing is raised
        weight = "seen" if self.options.get("weighted") else f"int(rank != {rank})"
        self.rule(f"yield 'gradients', 0, net, {weight}")
        if not self.divided:
            self.both("record_gradients(net)")

    def closure(self) -> None:
        self.ours("def closure():", "    optimizer.zero_grad()")
        self.rule("optimizer.zero_grad()")
        self.indent += not self.reference
        self.forward()
        self.both("loss = ((out - y) ** 2).mean()", "loss.backward()")
        self.ours("record_gradients(net)", "return loss")
        self.indent -= not self.reference
        if self.reference:
            self.both(f"yield 'gradients', 0, net, {self.weight()}", "optimizer.step()")
        else:
            self.both("optimizer.step(closure)")

    def update(self, how: str, event: dict[str, Any], rank: Optional[int]) -> None:
        """Clipping, the optimizer's step and the schedule's."""
        early = self.method in ("hvd", "chainermn")  # the average is taken in `step`
        clips = how in ("clip", "clip_value")
        wants = clips or how.startswith("drop_gradient") or how in ("reassign_grad", "skip", "grad_zeros")
        if self.method == "hvd" and (wants or self.uses_scaler and clips):
            self.catch("optimizer.synchronize()")
        if self.method == "hvd":
            self.synchronise_of_hvd(wants)
        if clips and self.uses_scaler:
            if self.method == "chainermn":
                self.rule("yield 'gradients', 0, net, 1")
            self.both("scaler.unscale_(optimizer)")
        if how == "clip" and self.method == "sharded":
            self.ours("optimizer.clip_grad_norm(0.5)")
            self.rule("torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)")
        elif how == "clip":
            self.both("torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)")
        elif how == "clip_value" and not self.divided:
            self.both("torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)")
        elif how.startswith("drop_gradient") and not self.divided:
            lines = [f"for p in net.{event['piece']}.parameters():", "    p.grad = None"]
            if not any(piece["name"] == event["piece"] for piece in self.p["pieces"]):
                lines = ["pass"]
            if how == "drop_gradient_one":
                self.rank_only(rank or 0, *lines)
            else:
                self.both(*lines)
        elif how == "grad_zeros" and not self.divided and any(piece["name"] == event["piece"] for piece in self.p["pieces"]):
            self.both(f"for p in net.{event['piece']}.parameters():", "    p.grad = torch.zeros_like(p)")
        elif how == "reassign_grad" and not self.divided:
            self.both("for p in net.parameters():", "    p.grad = None if p.grad is None else p.grad.clone()")
        if early and self.method == "chainermn" and not (clips and self.uses_scaler) and how not in ("skip", "skip_one"):
            self.rule("yield 'gradients', 0, net, 1")
        if how != "skip":
            self.step_line(how, rank, wants)
        if how == "step_twice" and not self.uses_scaler and not self.divided:
            self.after_step("plain", None)
            self.step_line("plain", None, wants)
        self.after_step(how, rank)

    def synchronise_of_hvd(self, wants: bool) -> None:
        self.rule(f"yield 'gradients', 0, net, {self.weight()}")

    def catch(self, line: str) -> None:
        if self.options.get("non_finite") == "raise" and self.method == "hvd" and not self.reference:
            self.both("try:", "    " + line, "except cohort.nn.NonFiniteError:", "    pass")
        elif not (self.reference and "synchronize" in line):
            self.both(line)

    def step_line(self, how: str, rank: Optional[int], synchronised: bool) -> None:
        line = "scaler.step(optimizer)" if self.uses_scaler else "optimizer.step()"
        if how == "skip_one":
            self.both(f"if rank != {rank}:")
            self.indent += 1
        if self.method == "hvd" and synchronised and not self.reference:
            self.both("with optimizer.skip_synchronize():", "    " + line)
        else:
            self.catch(line)
        if how == "skip_one":
            self.indent -= 1
        if self.uses_scaler:
            self.both("scaler.update()")

    def after_step(self, how: str, rank: Optional[int]) -> None:
        if self.method in ("local_sgd", "diloco"):
            weight = "len(x)" if self.options.get("weighted") else ""
            if not self.options.get("context"):
                self.ours(f"local.step({weight})")
            if how != "skip" or not self.options.get("context"):
                self.rule(f"yield 'stepped', 0, net, optimizer, {weight or 1}")
        if how == "clip_weights":
            self.both("with torch.no_grad():", "    for p in net.parameters():", "        p.clamp_(-0.5, 0.5)"
                      if not p_complex(self.p) else "        p.mul_(0.9)")  # fmt: skip
        if how == "write_one" and self.options.get("sharding") != "parameters":  # which ranks share
            self.rank_only(rank or 0, "with torch.no_grad():", "    for p in net.parameters():", "        p.mul_(0.9)")
        if self.schedule and how != "skip":
            self.both("schedule.step(loss.item())" if self.schedule == "Plateau" else "schedule.step()")

    def second_step(self) -> None:
        self.forward(key=1)
        self.both("loss2 = ((out - y) ** 2).mean()")
        self.both("loss2.backward()")
        if self.method in ("ddp", "sharded", "hvd"):
            weight = "len(x)" if self.method != "hvd" and self.weight() == "seen" else 1  # also where the first has no samples
            self.rule(f"yield 'gradients', 1, net2, {weight}")
        self.both("optimizer2.step()", "optimizer2.zero_grad()")
        if self.method == "local_sgd":
            if not self.options.get("context"):
                self.ours("local2.step()")
            self.rule("yield 'stepped', 1, net2, optimizer2, 1")
