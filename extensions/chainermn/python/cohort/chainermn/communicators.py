"""ChainerMN's communicators over Cohort: `create_communicator`, and its results."""

from __future__ import annotations

import array
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

import cohort
from cohort import Communicator, Work
from cohort._collective import all_gather_bytes, broadcast_bytes, cut
from cohort.chainermn import _gradients, _packets
from cohort.chainermn._packets import Bytes, Received
from cohort.errors import InvalidArgument
from cohort._core import require_same_on_all_ranks
from cohort.nn._tensors import broadcast_tensors
from cohort.horovod.torch._tensors import dense

__all__ = ["CommunicatorBase", "create_communicator"]

NAMES = ("naive", "flat", "pure_nccl", "non_cuda_aware", "hierarchical", "two_dimensional", "single_node", "dummy")
# The first of the tags for gradients. A gradient is sent back with the number that the sender of the values has chosen,
# because backward passes may send gradients in any order.
GRADIENTS = 2**30
_DEFAULTS: dict[str, Any] = {"allreduce_grad_dtype": None, "batched_copy": True}


def create_communicator(
    communicator_name: str = "pure_nccl", mpi_comm: Optional[Communicator] = None, **options: Any
) -> CommunicatorBase:
    """Returns a communicator of all processes of the job; calls `cohort.init()` if the process has not. Collective.

    communicator_name  any of ChainerMN's, which selected a transport; here all use shared memory within a host and TCP
                       between hosts, in host memory. "single_node" still requires a single host. "dummy" reduces as
                       well
    mpi_comm           a cohort.Communicator to use instead of the default world
    allreduce_grad_dtype, batched_copy  see set_config

    Raises ValueError for an unknown name, TypeError for an unknown option, and the errors of cohort.init.
    """
    if communicator_name not in NAMES:
        raise InvalidArgument(
            f"create_communicator: {communicator_name!r} is no communicator -- take one of {', '.join(NAMES)}"
        )
    for name in options:
        if name not in _DEFAULTS:
            raise TypeError(f"create_communicator: {name!r} is no option -- there are {', '.join(_DEFAULTS)}")
    if mpi_comm is None:
        cohort.init()
        mpi_comm = cohort.world()
    elif not isinstance(mpi_comm, Communicator):
        raise TypeError(
            f"create_communicator: mpi_comm is a {type(mpi_comm).__name__} -- a cohort.Communicator is needed, or nothing; "
            "under mpirun, too, cohort.init() finds the other processes without mpi4py"
        )
    communicator = CommunicatorBase(mpi_comm, communicator_name)
    for name, value in options.items():
        communicator.set_config(name, value)
    if communicator_name == "single_node" and communicator.inter_size != 1:
        raise InvalidArgument(
            f"create_communicator: 'single_node' is for one host, and this job has {communicator.inter_size} -- take 'naive'"
        )
    return communicator


class CommunicatorBase:
    """The ranks of a job, or of a part of it, with ChainerMN's names. Created by `create_communicator` and `split`.

    Arrays are NumPy's or torch's, of any type and shape, in host memory; received arrays are of the sender's library.
    Everything except the properties, `send` and `recv` is collective, so all ranks call it, in the same order. Every wait
    has a deadline (COHORT_TIMEOUT). If a rank cannot contribute its part (not an array, or cannot be pickled), it
    raises the reason, and the receivers raise InvalidArgument with its text. One thread per rank.
    """

    def __init__(self, communicator: Communicator, name: str = "naive", *, owned: bool = False) -> None:
        """owned: `finalize` also leaves `communicator`."""
        self._comm, self.name, self._owned = communicator, name, owned
        self._finalized = False
        self._config: dict[str, Any] = dict(_DEFAULTS)
        self._replies = 0
        self._outgoing: list[tuple[Work, Any]] = []
        self._hosts = _number_hosts(communicator)

    def __deepcopy__(self, memo: dict[int, Any]) -> CommunicatorBase:
        return self  # a model that holds a communicator can be copied

    def __reduce__(self) -> Any:
        raise TypeError(
            "a communicator cannot be pickled: it belongs to this process -- make one in each, by create_communicator"
        )

    # -------------------------------------------------------------------------------------------- ranks and sizes

    @property
    def communicator(self) -> Communicator:
        """Cohort's own communicator: barriers, other reductions, background operations. Raises InvalidArgument after
        finalize.
        """
        if self._finalized:
            raise InvalidArgument("this communicator has been finalized -- make another one with create_communicator")
        return self._comm

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self._comm.rank()

    @property
    def size(self) -> int:
        """The number of processes."""
        return self._comm.size()

    @property
    def intra_rank(self) -> int:
        """This process's number among those of its host."""
        return self._comm.local_rank()

    @property
    def intra_size(self) -> int:
        """The number of processes on this host."""
        return self._comm.local_size()

    @property
    def inter_rank(self) -> int:
        """This host's number; hosts are numbered by their lowest ranks."""
        return self._hosts[0]

    @property
    def inter_size(self) -> int:
        """The number of hosts."""
        return self._hosts[1]

    def split(self, color: Optional[int], key: int) -> Optional[CommunicatorBase]:
        """Returns a communicator of the ranks of the same color, numbered by key, then rank; None for color None.

        The new communicator has this one's name and settings.
        """
        part = self.communicator.split(color, key)
        if part is None:
            return None
        other = CommunicatorBase(part, self.name, owned=True)
        other._config = dict(self._config)
        return other

    def set_config(self, name: str, value: Any = True) -> None:
        """Sets an option. Raises ValueError for an unknown name or a value that has no meaning.

        allreduce_grad_dtype  the type in which gradients are reduced: 'float16', 'bfloat16', 'float32', 'float64', as
                              NumPy's or torch's as well; None: their own
        batched_copy          no effect: small gradients always travel together
        """
        self._known(name)
        if name == "allreduce_grad_dtype":
            value = _gradients.dtype_named(value)
        self._config[name] = value

    def get_config(self, name: Optional[str] = None) -> Any:
        """Returns the value of an option (allreduce_grad_dtype as a torch.dtype); without a name, a dict of all options."""
        if name is None:
            return dict(self._config)
        self._known(name)
        return self._config[name]

    @staticmethod
    def _known(name: str) -> None:
        if name not in _DEFAULTS:
            raise InvalidArgument(f"{name!r} is no setting of a communicator -- there are {', '.join(_DEFAULTS)}")

    def finalize(self) -> None:
        """Waits for all ranks, and ends the use of this communicator; a second call does nothing. The job goes on."""
        if self._finalized:
            return
        for work, _ in self._outgoing:
            work.wait()
        self._outgoing.clear()
        self._comm.barrier()
        self._finalized = True
        if self._owned:
            self._comm.leave()

    # -------------------------------------------------------------------------------------------- arrays

    def send(self, data: Any, dest: int, tag: int = 0) -> None:
        """Sends an array, or a tuple of arrays, to another rank. Returns when sending has begun, or when it has been
        received at the latest.

        tag  from 0, below 2**30. Raises InvalidArgument if dest is this rank.
        """
        self._send(_packets.of_arrays(data, "send"), dest, tag)

    def recv(self, source: int, tag: int = 0) -> Any:
        """Receives an array, or a tuple of arrays, that rank `source` sends with this tag."""
        return Received(self._recv(source, tag), source, "recv").arrays()

    def bcast(self, data: Any = None, max_buf_len: Optional[int] = None, root: int = 0) -> Any:
        """Returns the root's array: on the root `data` itself, elsewhere a new array, and `data` is ignored.

        max_buf_len  has no effect: there is no size limit
        """
        received = self._bcast(lambda: _one_array(data, "bcast"), root, "bcast")
        return data if received is None else received.arrays()

    def gather(self, data: Any, root: int = 0) -> Optional[tuple[Any, ...]]:
        """Returns, on the root, a tuple of all ranks' arrays, of one type and any shapes; None on the others."""
        parts = self._gather(lambda: _one_array(data, "gather"), root, "gather")
        return None if parts is None else of_one_type(parts, "gather")

    def allgather(self, x: Any) -> tuple[Any, ...]:
        """Returns a tuple of all ranks' arrays, of one type and any shapes."""
        parts = self._all_gather(lambda: _one_array(x, "allgather"), "allgather")
        return of_one_type(parts, "allgather")

    def alltoall(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        """Sends xs[r] to rank r, and returns a tuple of the arrays received, by rank, of any shapes.

        Raises ValueError unless there is one array for each rank.
        """
        parts = self._exchange(
            lambda: [_one_array(x, "alltoall") for x in self._one_for_each(xs, "alltoall")], "alltoall"
        )
        return of_one_type(parts, "alltoall")

    def scatter(self, xs: Any = None, root: int = 0) -> Any:
        """Returns this rank's part of the root's `xs`: a tuple of arrays of any shapes, or one array with a row for
        each rank.

        `xs` is used on the root only. Raises ValueError there unless there is one part for each rank.
        """
        make = lambda: [_one_array(x, "scatter") for x in self._one_for_each(xs, "scatter")]  # noqa: E731
        return self._scatter(make, root, "scatter").arrays()

    def allreduce(self, data: Any) -> Any:
        """Returns the sum over all ranks of arrays of one shape and type: a new array."""
        if not _packets.is_array(data):
            raise TypeError(
                f"allreduce: a NumPy array or a torch tensor is needed, not {type(data).__name__} -- or allreduce_obj"
            )
        if isinstance(data, torch.Tensor):
            total: Any = dense(data.detach(), "allreduce").clone(memory_format=torch.contiguous_format)
        else:
            total = data.copy(order="C")
        self.communicator.all_reduce(total)
        return total

    # -------------------------------------------------------------------------------------------- objects

    def send_obj(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Sends an object to another rank, pickled."""
        packet, error = _packets.attempt(lambda: _packets.of_object(obj))
        self._send(packet, dest, tag)
        if error is not None:
            raise error

    def recv_obj(self, source: int, status: None = None, tag: int = 0) -> Any:
        """Returns the object that rank `source` sends with this tag. `status` exists for MPI's sake, and has to be None."""
        if status is not None:
            raise InvalidArgument("recv_obj: there is no status -- who sends is known, since source names it")
        return Received(self._recv(source, tag), source, "recv_obj").object()

    def bcast_obj(self, obj: Any = None, max_buf_len: Optional[int] = None, root: int = 0) -> Any:
        """Returns the root's object: on the root `obj` itself, elsewhere a copy. max_buf_len has no effect."""
        return self._bcast_object(lambda: obj, root, "bcast_obj")

    def gather_obj(self, obj: Any, root: int = 0) -> Optional[list[Any]]:
        """Returns a list of all ranks' objects on the root, None on the others."""
        parts = self._gather(lambda: _packets.of_object(obj), root, "gather_obj")
        return None if parts is None else [part.object() for part in parts]

    def allgather_obj(self, obj: Any) -> list[Any]:
        """Returns a list of all ranks' objects."""
        return [part.object() for part in self._all_gather(lambda: _packets.of_object(obj), "allgather_obj")]

    def scatter_obj(self, objs: Optional[Sequence[Any]] = None, root: int = 0) -> Any:
        """Returns the root's object for this rank, from a sequence with one object for each rank, which is used on the
        root only.
        """
        make = lambda: [_packets.of_object(one) for one in self._one_for_each(objs, "scatter_obj")]  # noqa: E731
        return self._scatter(make, root, "scatter_obj").object()

    def alltoall_obj(self, objs: Sequence[Any]) -> list[Any]:
        """Sends objs[r] to rank r, and returns the objects received, by rank."""
        make = lambda: [_packets.of_object(one) for one in self._one_for_each(objs, "alltoall_obj")]  # noqa: E731
        return [part.object() for part in self._exchange(make, "alltoall_obj")]

    def allreduce_obj(self, obj: Any) -> Any:
        """Returns the sum of all ranks' objects by `+`, from rank 0 on."""
        return functools.reduce(operator.add, self.allgather_obj(obj))

    # -------------------------------------------------------------------------------------------- models

    def bcast_data(self, model: torch.nn.Module) -> None:
        """Sets the model's parameters and buffers to rank 0's. Raises Mismatch on every rank if the ranks' models
        differ.
        """
        tensors = [*model.named_parameters(), *model.named_buffers()]
        require_same_on_all_ranks(
            self.communicator, [f"'{n}' of {str(t.dtype)[6:]} {list(t.shape)}" for n, t in tensors], who="bcast_data"
        )
        broadcast_tensors(self._comm, [tensor.detach() for _, tensor in tensors])

    broadcast_data = bcast_data

    def multi_node_mean_grad(self, model: _gradients.Parameters, zero_fill: bool = False) -> None:
        """Replaces the gradients of a module, or of a list of parameters, by their means over all ranks.

        zero_fill  parameters without a gradient contribute zeros; otherwise they stay without, which has to be the case on
                   all ranks

        Each rank counts once, however many samples it had. Sparse gradients become dense. Raises Mismatch on every rank
        if the ranks' gradients are not of the same parameters.
        """
        parameters = _gradients.collected(self.communicator, _gradients.named_parameters(model), zero_fill)
        _gradients.Mean(self._comm, parameters, self._config["allreduce_grad_dtype"], copied=False).deliver()

    allreduce_grad = multi_node_mean_grad

    # -------------------------------------------------------------------------------------------- packets

    def _send(self, packet: bytearray, dest: int, tag: int) -> None:
        _require_tag(tag)
        self._drop_sent()
        sizes = array.array("q", [len(packet)])
        self.communicator.send(sizes, dest, tag=tag)
        self._comm.send(packet, dest, tag=tag)

    def _send_later(self, packet: bytearray, dest: int, tag: int) -> None:
        """Like _send, but does not wait, so that two ranks may both send first, and then receive."""
        self._drop_sent()
        sizes = array.array("q", [len(packet)])
        for data in (sizes, packet):
            self._outgoing.append((self.communicator.send(data, dest, tag=tag, async_op=True), data))

    def _drop_sent(self) -> None:
        sent = [work for work, _ in self._outgoing if work.done()]
        self._outgoing = [one for one in self._outgoing if one[0] not in sent]
        for work in sent:
            work.wait()  # raises its error, if it has one

    def _send_gradients(self, packet: bytearray, dest: int, reply: int) -> None:
        self._send_later(packet, dest, GRADIENTS + reply)

    def _recv_gradients(self, source: int, reply: int, what: str) -> Any:
        return Received(self._recv_packet(source, GRADIENTS + reply), source, what).arrays()

    def _recv(self, source: int, tag: int) -> bytearray:
        _require_tag(tag)
        return self._recv_packet(source, tag)

    def _recv_packet(self, source: int, tag: int) -> bytearray:
        sizes = array.array("q", [0])
        self.communicator.recv(sizes, source, tag=tag)
        packet = bytearray(sizes[0])
        self._comm.recv(packet, source, tag=tag)
        return packet

    def _bcast(self, make: Callable[[], bytearray], root: int, what: str) -> Optional[Received]:
        """Broadcasts the root's packet. Returns None on the root."""
        self._require_rank(root, what)
        packet, error = _packets.attempt(make) if self.rank == root else (b"", None)
        received = broadcast_bytes(self.communicator, packet, root)
        if error is not None:
            raise error
        return None if self.rank == root else Received(received, root, what)

    def _bcast_object(self, make: Callable[[], Any], root: int, what: str) -> Any:
        """Returns the root's result of `make`: on the root itself, elsewhere a copy."""
        made = None

        def pack() -> bytearray:
            nonlocal made
            made = make()
            return _packets.of_object(made)

        received = self._bcast(pack, root, what)
        return made if received is None else received.object()

    def _gather(self, make: Callable[[], bytearray], root: int, what: str) -> Optional[list[Received]]:
        """Gathers packets on the root. Returns None on the others."""
        self._require_rank(root, what)
        is_root = self.rank == root
        make_all = lambda: [b""] * root + [make()] + [b""] * (self.size - root - 1)  # noqa: E731
        received = self._exchange(make_all, what, range(self.size) if is_root else ())
        return received if is_root else None

    def _scatter(self, make: Callable[[], Sequence[Bytes]], root: int, what: str) -> Received:
        self._require_rank(root, what)
        return self._exchange(make if self.rank == root else lambda: [b""] * self.size, what, [root])[0]

    def _exchange(
        self, make: Callable[[], Sequence[Bytes]], what: str, sources: Optional[Sequence[int]] = None
    ) -> list[Received]:
        """Sends make()[r], which may be empty, to rank r; returns the packets of the sources, by default all ranks."""
        try:
            packets, error = make(), None
        except Exception as failure:
            packets, error = [_packets.of_error(failure)] * self.size, failure
        counts = array.array("q", [len(packet) for packet in packets])
        theirs = array.array("q", bytes(8 * self.size))
        self.communicator.all_to_all(counts, theirs)
        together = bytearray(sum(theirs))
        self._comm.all_to_all_v(bytearray().join(packets), list(counts), together, list(theirs))
        if error is not None:
            raise error
        parts = cut(together, theirs)
        return [Received(parts[rank], rank, what) for rank in (range(self.size) if sources is None else sources)]

    def _all_gather(self, make: Callable[[], bytearray], what: str) -> list[Received]:
        packet, error = _packets.attempt(make)
        received = all_gather_bytes(self.communicator, packet)
        if error is not None:
            raise error
        return [Received(one, rank, what) for rank, one in enumerate(received)]

    def _require_rank(self, root: int, what: str) -> None:
        if not 0 <= root < self.size:
            raise InvalidArgument(f"{what}: the root is rank {root} in a world of {self.size}")

    def _one_for_each(self, xs: Any, what: str) -> Sequence[Any]:
        count = len(xs) if _packets.is_array(xs) and xs.ndim or isinstance(xs, (tuple, list)) else None
        if count != self.size:
            found = type(xs).__name__ if count is None else f"{count} parts"
            raise InvalidArgument(f"{what}: a tuple of one part for each of {self.size} ranks is needed, not {found}")
        return [xs[rank] for rank in range(self.size)]

    def _next_reply(self) -> int:
        """Returns a number, from 1, under which a gradient is awaited."""
        self._replies = self._replies % (2**29) + 1
        return self._replies

    def _seed(self) -> int:
        """Returns a random number from rank 0's torch generator (see torch.manual_seed), equal on all ranks."""
        return int(self.bcast_obj(int(torch.randint(2**62, ()))))


def _require_tag(tag: int) -> None:
    if not 0 <= tag < GRADIENTS:
        raise InvalidArgument(f"the tag is {tag}; tags are from 0, below 2**30")


def _one_array(data: Any, what: str) -> bytearray:
    if isinstance(data, (tuple, list)):
        raise TypeError(f"{what}: one array is needed, not a {type(data).__name__}")
    return _packets.of_arrays(data, what)


def of_one_type(received: Sequence[Received], what: str) -> tuple[Any, ...]:
    arrays = tuple(one.arrays() for one in received)
    types = [_packets.type_name(one) for one in arrays]
    for rank, name in enumerate(types):
        if name != types[0]:
            raise InvalidArgument(
                f"{what}: arrays of one type are needed -- rank 0 brought {types[0]}, rank {rank} {name}"
            )
    return arrays


def _number_hosts(comm: Communicator) -> tuple[int, int]:
    """Returns this host's number, by the lowest ranks of hosts, and the number of hosts."""
    names = [str(one, "utf-8") for one in all_gather_bytes(comm, comm.host().encode())]
    first = list(dict.fromkeys(names))
    counts = {name: names.count(name) for name in first}
    agreed = array.array("b", [counts[comm.host()] == comm.local_size()])
    comm.all_reduce(agreed, op="min")
    if not agreed[0]:
        raise InvalidArgument(
            f"create_communicator: different hosts have the same name -- of {', '.join(first)} -- give each its own (hostname), or "
            "use cohort.world(), which does not go by names"
        )
    return first.index(comm.host()), len(first)
