"""The states of a rank's torch generators: the CPU's, and those of the GPUs that its module is on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import torch

from cohort.errors import InvalidArgument


def _gpus(module: torch.nn.Module) -> Iterator[tuple[str, torch.device]]:
    """Yields GPUs by ascending index: "cuda/0" is the module's first GPU, whatever its index."""
    tensors = itertools.chain(module.parameters(), module.buffers())
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    for number, device in enumerate(sorted(devices, key=lambda device: device.index)):
        yield f"cuda/{number}", device


def random_states(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the states by generator: "cpu", "cuda/0", ..."""
    states = {"cpu": torch.get_rng_state()}
    states.update((name, torch.cuda.get_rng_state(device)) for name, device in _gpus(module))
    return states


def restored_random_states(
    module: torch.nn.Module, saved: Mapping[str, torch.Tensor], source: str
) -> Callable[[], None]:
    """Returns a function that restores the generators whose states are in `saved`. Raises InvalidArgument if a GPU's
    state is not in the format of this torch."""
    gpus = [(device, saved[name]) for name, device in _gpus(module) if name in saved]
    for device, state in gpus:
        if state.shape != torch.cuda.get_rng_state(device).shape:
            raise InvalidArgument(
                f"{source}: the random state for {device} has {state.numel()} bytes, which is not how torch "
                f"{torch.__version__} has it -- load it with the version that saved it"
            )

    def apply() -> None:
        if "cpu" in saved:
            torch.set_rng_state(saved["cpu"])
        for device, state in gpus:
            torch.cuda.set_rng_state(state, device)

    return apply
