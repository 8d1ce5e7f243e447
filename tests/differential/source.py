"""Writes a program as Python: for the ranks of a world, as a user would have written it, and for the reference, without a line of
Cohort. Both have the same lines, but for those that wrap, and the reference's `yield`s, where the method's rule is applied
between replicas (`reference`)."""

from __future__ import annotations

from typing import Any, Optional

from writer import Writer, p_complex


def text_of(program: dict[str, Any], reference: bool) -> str:
    """Classes, and a function `phase_N(rank, size)` for each number of ranks in turn."""
    return Source(program, reference).text()


def phases_of(program: dict[str, Any]) -> list[int]:
    """Ranks of each phase."""
    return [program["ranks"], *(event["ranks"] for event in program["events"] if event["kind"] == "resume")]


def replicas_of(program: dict[str, Any]) -> list[int]:
    """Replicas of each phase: one for each rank, or virtual rank."""
    return [program.get("virtual", ranks) for ranks in phases_of(program)]


class Source(Writer):
    """With what a program does between steps."""

    def module(self, event: dict[str, Any]) -> Optional[str]:
        return event["piece"] if any(piece["name"] == event["piece"] for piece in self.p["pieces"]) else None

    def kind_of(self, event: dict[str, Any]) -> str:
        return next((piece["kind"] for piece in self.p["pieces"] if piece["name"] == event["piece"]), "")

    def on_freeze(self, event: dict[str, Any]) -> None:
        if self.module(event):
            self.both(f"net.{event['piece']}.requires_grad_(False)")

    def on_thaw(self, event: dict[str, Any]) -> None:
        if self.module(event) and self.method != "torch_ddp":  # torch's own does not average it
            self.both(f"net.{event['piece']}.requires_grad_(True)")
            if event["optimizer"] == "add_group":
                self.add_group()

    def add_group(self) -> None:
        self.both("new = [p for p in net.parameters() if p.requires_grad and not any(p is one for one in held)]", "held += new",
                  "if new:", "    optimizer.add_param_group({'params': new, 'lr': 0.02})")  # fmt: skip
        if self.method == "chainermn":
            self.rule("if new:", "    yield 'grouped', 0, net, None")

    def on_add_group(self, event: dict[str, Any]) -> None:
        self.add_group()

    def new_optimizer(self) -> None:
        if self.method in ("local_sgd", "diloco"):
            self.ours("local.synchronize()")
            self.rule("yield 'synchronize', 0, net, optimizer")
        self.held_names()
        self.make_optimizer()
        if self.method in ("local_sgd", "diloco", "hvd", "chainermn"):
            self.wrap()
        self.schedule = None

    def on_new_optimizer(self, event: dict[str, Any]) -> None:
        self.new_optimizer()

    def brought(self, event: dict[str, Any]) -> None:
        """New parameters are given to the optimizer."""
        if event["optimizer"] == "new":
            self.new_optimizer()
        elif event["optimizer"] == "add_group":
            self.add_group()
        if self.method in ("hvd", "torch_ddp") and event["optimizer"] != "new":
            self.ours("hvd.broadcast_parameters(net.state_dict(), 0, ranks)" if self.method == "hvd" else "pass")
            self.rule("yield 'broadcast', 0, net, None")

    def on_replace(self, event: dict[str, Any]) -> None:
        if self.module(event) and self.method != "torch_ddp":
            self.both(f"net.{event['piece']} = nn.Linear(8, 8).to(torch.{self.dtype})")
            self.brought(event)

    def on_append(self, event: dict[str, Any]) -> None:
        if self.method != "torch_ddp":
            self.extra += 1
            self.both(f"net.more{self.extra} = nn.Linear(8, 8).to(torch.{self.dtype})")
            self.brought(event)

    def on_cast(self, event: dict[str, Any]) -> None:
        if self.method == "torch_ddp" or p_complex(self.p) or self.method == "sharded":
            return
        self.dtype = event["to"]
        self.both(f"model.to(torch.{event['to']})")

    def on_cast_and_back(self, event: dict[str, Any]) -> None:
        if not p_complex(self.p) and self.method != "torch_ddp":  # torch's own loses its hooks
            self.both(f"model.to(torch.{event['to']})", "half = copy.deepcopy(net.state_dict())",
                      f"model.to(torch.{self.dtype})")  # fmt: skip
            self.written()

    def on_reassign_data(self, event: dict[str, Any]) -> None:
        if self.module(event):
            self.both(f"for p in net.{event['piece']}.parameters():", "    p.data = p.data.clone()")

    def written(self) -> None:
        if self.method in ("local_sgd", "diloco"):
            self.ours("local.parameters_written()")
            self.rule("yield 'written', 0, net, optimizer")
        elif self.method == "sharded":
            self.ours("model.parameters_written()")

    def on_reload(self, event: dict[str, Any]) -> None:
        target = event["by"] if self.method in ("ddp", "sharded") else "net"
        if self.options.get("sharding") == "parameters":
            self.ours("world.barrier()  # the ranks of a host share parameters: nobody reads them any more")
        self.both(f"{target}.load_state_dict(snapshot, strict=False)")
        if not event.get("unsaid"):
            self.written()

    def on_reload_assign(self, event: dict[str, Any]) -> None:
        if self.method != "torch_ddp":
            self.both("net.load_state_dict(copy.deepcopy(snapshot), strict=False, assign=True)", "for name, p in net.named_parameters():",
                      "    p.requires_grad_(True)")  # fmt: skip
            self.dtype = self.p["dtype"]
            self.both(f"net.to(torch.{self.dtype})") if not p_complex(self.p) else None
            self.new_optimizer()

    def on_rate(self, event: dict[str, Any]) -> None:
        self.both("for one in optimizer.param_groups:", "    one['lr'] *= 0.5")

    def on_momentum(self, event: dict[str, Any]) -> None:
        if self.p["optimizer"]["kind"] == "SGD" and not self.p["optimizer"]["options"].get("nesterov"):
            self.both("for one in optimizer.param_groups:", "    one['momentum'] = 0.5")

    def on_rate_one(self, event: dict[str, Any]) -> None:
        self.rank_only(event["rank"], "for one in optimizer.param_groups:", "    one['lr'] *= 0.5")

    def on_decay_one(self, event: dict[str, Any]) -> None:
        self.rank_only(event["rank"], "for one in optimizer.param_groups:", "    one['weight_decay'] = 0.1")

    def on_epoch(self, event: dict[str, Any]) -> None:
        if self.schedule and self.schedule != "Plateau":
            self.both("schedule.step()")

    def on_eval(self, event: dict[str, Any]) -> None:
        self.training = not self.training
        self.both("model.train()" if self.training else "model.eval()")

    def on_gate(self, event: dict[str, Any]) -> None:
        if self.kind_of(event) == "Gate":
            self.both(f"net.{event['piece']}.on = rank != {event['rank']}")

    def on_channels_last(self, event: dict[str, Any]) -> None:
        if self.method != "torch_ddp":  # torch's own says that it has other strides than its buckets
            self.both("net.to(memory_format=torch.channels_last)")

    def on_reload_optimizer(self, event: dict[str, Any]) -> None:
        self.both("optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))")
        self.rule("yield 'reloaded', 0, net, None")

    def on_wrap_again(self, event: dict[str, Any]) -> None:
        if self.method == "ddp":
            self.wrap()

    def on_write(self, event: dict[str, Any]) -> None:
        if self.options.get("sharding") == "parameters":
            self.ours("world.barrier()")
        self.both("with torch.no_grad():", "    for p in net.parameters():", "        p.mul_(0.9)")
        if self.options.get("sharding") != "parameters":  # which ranks share, so that it would be done once for each
            self.written()

    def on_share_memory(self, event: dict[str, Any]) -> None:
        self.both("net.share_memory()")

    def on_deepcopy(self, event: dict[str, Any]) -> None:
        self.both("other = copy.deepcopy(net)")

    def on_train_the_copy(self, event: dict[str, Any]) -> None:
        """With a new optimizer, as the old one's parameters are the original's."""
        if self.method == "ddp" and not self.options.get("hook"):
            self.ours("model = copy.deepcopy(model)", "net = model.module")
            self.rule("net = model = copy.deepcopy(net)", "yield 'wrap', 0, net, None")
            self.new_optimizer()

    def on_set_gradients(self, event: dict[str, Any]) -> None:
        """Between steps, the same on all ranks: the next backward adds to them."""
        if self.method in ("ddp", "local_sgd", "diloco", "chainermn") and not p_complex(self.p):
            self.both("for p in net.parameters():", "    p.grad = torch.full_like(p, 0.01)")

    def on_set_buffer(self, event: dict[str, Any]) -> None:
        name = next((piece["name"] for piece in self.p["pieces"] if piece["kind"] == "BatchNorm"), None)
        if name and self.method != "torch_ddp":
            self.both(f"net.{name}.running_mean = torch.ones_like(net.{name}.running_mean) * (rank + 1)")

    def on_save_on_cpu(self, event: dict[str, Any]) -> None:
        self.both("model.cpu()", "saved_weights = copy.deepcopy(model.state_dict())", "model.to('cpu')")

    def on_tie(self, event: dict[str, Any]) -> None:
        linear = next((one["name"] for one in self.p["pieces"] if one["kind"] == "Linear"), None)
        if self.kind_of(event) == "Linear" and linear != event["piece"] and self.method != "torch_ddp":
            self.both(f"net.{event['piece']}.weight = net.{linear}.weight")

    def on_untie(self, event: dict[str, Any]) -> None:
        if self.kind_of(event) in ("Linear", "Tied") and self.method != "torch_ddp":
            self.both(f"net.{event['piece']}.weight = nn.Parameter(net.{event['piece']}.weight.detach().clone())")
            self.add_group()

    def on_buffer(self, event: dict[str, Any]) -> None:
        if self.method != "torch_ddp" and not self.options.get("fragment_sync_delay"):  # (one that comes under way is averaged, too)
            self.extra += 1
            self.both(f"net.register_buffer('seen{self.extra}', torch.ones(3) * rank)")
