import datetime
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Callable, Literal, Optional, TypeVar, Union, overload

# A torch tensor, a NumPy array, or anything with the buffer protocol or DLPack: contiguous, in the host's memory.
Array = Any
Arrays = Union[list[Any], tuple[Any, ...]]
Seconds = Union[float, datetime.timedelta]
Op = Union["ReduceOp", str]
_T = TypeVar("_T")

__version__: str

class ReduceOp:
    Sum: ReduceOp
    Average: ReduceOp
    Min: ReduceOp
    Max: ReduceOp
    Product: ReduceOp
    BitAnd: ReduceOp
    BitOr: ReduceOp
    BitXor: ReduceOp
    @property
    def name(self) -> str: ...
    @property
    def value(self) -> int: ...

class Memory:
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    @property
    def nbytes(self) -> int: ...
    def data_ptr(self) -> int: ...
    def as_numpy(self, dtype: Any, shape: Union[None, int, Sequence[int]] = None) -> Any: ...
    def as_torch(self, dtype: Any, shape: Union[None, int, Sequence[int]] = None) -> Any: ...

class Work:
    def wait(self, timeout: Optional[Seconds] = None) -> bool: ...
    def synchronize(self, stream: Any = None) -> None: ...
    def done(self) -> bool: ...
    def error(self) -> Optional[Exception]: ...
    def finite(self) -> Optional[bool]: ...
    def source(self) -> Optional[int]: ...

class Communicator:
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def local_rank(self) -> int: ...
    def local_size(self) -> int: ...
    def cross_rank(self) -> int: ...
    def cross_size(self) -> int: ...
    def host(self) -> str: ...
    def timeout(self) -> float: ...
    @property
    def has_left(self) -> bool: ...
    def split(self, color: Optional[int] = 0, key: int = 0, *, timeout: Optional[Seconds] = None) -> Optional[Communicator]: ...
    def group(self, ranks: Sequence[int], *, timeout: Optional[Seconds] = None) -> Optional[Communicator]: ...
    def join(self, *, timeout: Optional[Seconds] = None) -> int: ...
    def allocate(self, bytes: int) -> Memory: ...
    def abort(self, reason: str) -> None: ...
    def leave(self, *, grace: Optional[Seconds] = None, reason: str = ...) -> None: ...
    @overload
    def all_reduce(
        self,
        data: Array,
        output: None = None,
        *,
        op: Op = "sum",
        weight: Optional[float] = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wire_dtype: Any = None,
        gpu_sums: Optional[Literal["fast", "exact"]] = None,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> None: ...
    @overload
    def all_reduce(
        self,
        data: Array,
        output: _T,
        *,
        op: Op = "sum",
        weight: Optional[float] = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wire_dtype: Any = None,
        gpu_sums: Optional[Literal["fast", "exact"]] = None,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> _T: ...
    @overload
    def all_reduce(
        self,
        data: Array,
        output: Array = None,
        *,
        op: Op = "sum",
        weight: Optional[float] = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        wire_dtype: Any = None,
        check_finite: bool = False,
        gpu_sums: Optional[Literal["fast", "exact"]] = None,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def reduce(
        self,
        data: Array,
        output: None = None,
        *,
        root: int = 0,
        op: Op = "sum",
        weight: Optional[float] = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        gpu_sums: Optional[Literal["fast", "exact"]] = None,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> None: ...
    @overload
    def reduce(
        self,
        data: Array,
        output: _T,
        *,
        root: int = 0,
        op: Op = "sum",
        weight: Optional[float] = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        gpu_sums: Optional[Literal["fast", "exact"]] = None,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> _T: ...
    @overload
    def reduce(
        self,
        data: Array,
        output: Array = None,
        *,
        root: int = 0,
        op: Op = "sum",
        weight: Optional[float] = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        gpu_sums: Optional[Literal["fast", "exact"]] = None,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def reduce_scatter(
        self,
        input: Array,
        output: _T,
        *,
        op: Op = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        gpu_sums: Optional[Literal["fast", "exact"]] = None,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> _T: ...
    @overload
    def reduce_scatter(
        self,
        input: Array,
        output: Array,
        *,
        op: Op = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        gpu_sums: Optional[Literal["fast", "exact"]] = None,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def reduce_scatter_v(
        self,
        input: Array,
        output: _T,
        counts: Sequence[int],
        *,
        op: Op = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        gpu_sums: Optional[Literal["fast", "exact"]] = None,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> _T: ...
    @overload
    def reduce_scatter_v(
        self,
        input: Array,
        output: Array,
        counts: Sequence[int],
        *,
        op: Op = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
        gpu_sums: Optional[Literal["fast", "exact"]] = None,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def broadcast(
        self,
        data: Array,
        *,
        root: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> None: ...
    @overload
    def broadcast(
        self,
        data: Array,
        *,
        root: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def all_gather(
        self,
        input: Array,
        output: _T,
        *,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> _T: ...
    @overload
    def all_gather(
        self,
        input: Array,
        output: Array,
        *,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def all_gather_v(
        self,
        input: Array,
        output: _T,
        counts: Sequence[int],
        *,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> _T: ...
    @overload
    def all_gather_v(
        self,
        input: Array,
        output: Array,
        counts: Sequence[int],
        *,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def gather(
        self,
        input: Array,
        output: Array = None,
        *,
        root: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> Any: ...
    @overload
    def gather(
        self,
        input: Array,
        output: Array = None,
        *,
        root: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def scatter(
        self,
        input: Array,
        output: _T,
        *,
        root: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> _T: ...
    @overload
    def scatter(
        self,
        input: Array,
        output: Array,
        *,
        root: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def gather_v(
        self,
        input: Array,
        output: Array,
        counts: Sequence[int],
        *,
        root: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> Any: ...
    @overload
    def gather_v(
        self,
        input: Array,
        output: Array,
        counts: Sequence[int],
        *,
        root: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def scatter_v(
        self,
        input: Array,
        output: _T,
        counts: Sequence[int],
        *,
        root: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> _T: ...
    @overload
    def scatter_v(
        self,
        input: Array,
        output: Array,
        counts: Sequence[int],
        *,
        root: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def all_to_all(
        self,
        input: Array,
        output: _T,
        *,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> _T: ...
    @overload
    def all_to_all(
        self,
        input: Array,
        output: Array,
        *,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def all_to_all_v(
        self,
        input: Array,
        input_counts: Sequence[int],
        output: _T,
        output_counts: Sequence[int],
        *,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> _T: ...
    @overload
    def all_to_all_v(
        self,
        input: Array,
        input_counts: Sequence[int],
        output: Array,
        output_counts: Sequence[int],
        *,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def barrier(self, *, timeout: Optional[Seconds] = None, async_op: Literal[False] = False) -> None: ...
    @overload
    def barrier(self, *, timeout: Optional[Seconds] = None, async_op: Literal[True]) -> Work: ...
    @overload
    def send(
        self,
        data: Array,
        peer: int,
        *,
        tag: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> None: ...
    @overload
    def send(
        self,
        data: Array,
        peer: int,
        *,
        tag: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...
    @overload
    def recv(
        self,
        data: Array,
        peer: Optional[int] = None,
        *,
        tag: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[False] = False,
    ) -> Optional[int]: ...
    @overload
    def recv(
        self,
        data: Array,
        peer: Optional[int] = None,
        *,
        tag: int = 0,
        timeout: Optional[Seconds] = None,
        async_op: Literal[True],
    ) -> Work: ...

def environment_value(name: str) -> Union[None, bool, int, float, str]: ...
def supports(dtype: Any, op: Op) -> bool: ...
def join(
    *,
    init_method: str,
    rank: int,
    world_size: int,
    secret_file: str,
    group_name: str,
    program: str,
    join_timeout: Optional[Seconds],
    timeout: Optional[Seconds],
    transport: str,
    alone: bool,
    trust_network: bool,
    share: Optional[Callable[[str, Optional[str], float], str]],
    share_name: str,
) -> Communicator: ...
class RunRecord:
    def __init__(
        self, file: Any, *, program: str = "", world_size: int = 1, parameters: dict[str, Any] = {}
    ) -> None: ...
    def write(self, event: str, **fields: Any) -> None: ...
    def write_communication(self) -> None: ...
    def step(self, step: int, samples: int, seconds: float, exposed_communication_seconds: float = 0.0) -> None: ...
    def observe(self, world: Communicator) -> None: ...
    @property
    def file(self) -> Any: ...

class Metrics:
    def __init__(self, record: RunRecord | None, world: Communicator | None = None) -> None: ...
    def log(self, step: int, values: dict[str, Any], reduce: str | None = None) -> None: ...
    def flush(self) -> None: ...
    def close(self, patience: float | None = None) -> None: ...

class Progress:
    def __init__(
        self,
        *,
        steps_per_epoch: int = 0,
        epochs: int = 0,
        first_step: int = 0,
        first_epoch: int = 0,
        steps_left_in_first_epoch: Optional[int] = None,
        terminal: Optional[bool] = None,
        interval: Optional[Seconds] = None,
    ) -> None: ...
    def update(self, step: int, loss: float, samples: int) -> None: ...
    def skip_time(self) -> None: ...
    def line(self, text: str) -> None: ...
    def finish(self) -> None: ...

def plot(record_file: Any, svg_file: Any) -> None: ...
def way_to_meet(rank: int, world_size: int) -> str: ...
def form_thread_world(size: int, timeout: Optional[Seconds]) -> list[Communicator]: ...
def leave_all(*, grace: Optional[Seconds], reason: str, failed: bool) -> None: ...

# For the package itself: files of tensors, and folders of checkpoints. A tensor is (name, type as torch calls it, shape,
# bytes); what is written are arrays of uint8.
_NamedBytes = tuple[str, str, list[int], "Bytes"]

class Bytes:
    def __init__(self, size: int) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

class StoredCheckpoint:
    def require_whole(self) -> None: ...
    @property
    def folder(self) -> str: ...
    @property
    def generation(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def epoch(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def created(self) -> str: ...
    @property
    def program(self) -> str: ...
    @property
    def values(self) -> dict[str, Union[bool, int, float, str]]: ...
    @property
    def sampler(self) -> Optional[tuple[int, int, int, int]]: ...

def list_checkpoints(folder: str) -> list[StoredCheckpoint]: ...

class CheckpointFollower:
    def __init__(self, folder: str, after_generation: int, look_every: float, timeout: Optional[float]) -> None: ...
    def next_within(self, seconds: float) -> tuple[bool, Optional[int]]: ...
    @property
    def training_is_over(self) -> bool: ...


_TensorsToWrite = list[tuple[str, str, Sequence[int], Array]]

class CheckpointBundle:
    def __init__(
        self,
        *,
        step: int,
        epoch: int,
        program: str,
        sampler: Optional[tuple[int, int, int, int]],
        values: dict[str, Union[bool, int, float, str]],
        files: list[tuple[str, _TensorsToWrite, dict[str, str]]],
        random: _TensorsToWrite,
        state: _TensorsToWrite,
    ) -> None: ...

class PendingSave:
    def done(self) -> bool: ...
    def wait(self) -> StoredCheckpoint: ...

class Checkpoints:
    def __init__(self, folder: str, keep: int, place: str, copies: int) -> None: ...
    def save(self, comm: Optional[Communicator], bundle: CheckpointBundle) -> StoredCheckpoint: ...
    def save_async(self, comm: Optional[Communicator], bundle: CheckpointBundle) -> PendingSave: ...
    def settle(self, comm: Optional[Communicator]) -> None: ...
    def close(self) -> None: ...
    def load_newest(
        self, comm: Optional[Communicator], unwanted: set[str], latest: Optional[int]
    ) -> tuple[Optional[StoredCheckpoint], dict[str, Bytes], Optional[Bytes], list[str], Optional[Exception]]: ...
    def load_parts(self, comm: Optional[Communicator], stored: StoredCheckpoint, ranks: set[int]) -> dict[int, Bytes]: ...

def parse_safetensors(bytes: Bytes, name: str) -> tuple[list[_NamedBytes], dict[str, str]]: ...
def read_weights(path: str, key: str) -> tuple[list[_NamedBytes], dict[str, str]]: ...
def write_weights(path: str, tensors: list[tuple[str, str, Sequence[int], Array]], pt: bool) -> None: ...
def status_fd() -> int: ...
def traced() -> bool: ...
def add_span(name: str, begun_ns: int) -> None: ...
def count_step() -> None: ...
def say_last_words(words: str, cause: BaseException | None = None) -> bool: ...
def keep_last_words() -> None: ...
def add_to_last_words(fd: int) -> None: ...
def announce_stacks() -> None: ...

class JobStore:
    def __init__(self, timeout: float) -> None: ...
    def put(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, timeout: float) -> Optional[bytes]: ...
    def wait(self, key: str, timeout: float) -> bytes: ...
    def remove(self, key: str) -> None: ...

def named_calls() -> Any: ...
def named_records_keep(on: bool) -> None: ...
def named_records_take() -> list[tuple[str, str, float, float, float, str]]: ...
class PsSgd:
    def __init__(
        self,
        lr: float,
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
    ) -> None: ...
    @property
    def lr(self) -> float: ...

class PsAdagrad:
    def __init__(
        self,
        lr: float,
        lr_decay: float,
        weight_decay: float,
        initial_accumulator_value: float,
        eps: float,
    ) -> None: ...
    @property
    def lr(self) -> float: ...

class PsRowAdagrad:
    def __init__(self, lr: float, initial_accumulator_value: float, eps: float) -> None: ...
    @property
    def lr(self) -> float: ...

class PsAdam:
    def __init__(
        self,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None: ...
    @property
    def lr(self) -> float: ...

class PsAdamW:
    def __init__(
        self,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None: ...
    @property
    def lr(self) -> float: ...

class PsFtrl:
    def __init__(self, lr: float, beta: float, l1: float, l2: float) -> None: ...
    @property
    def lr(self) -> float: ...

class PsInitializer:
    @staticmethod
    def constant(value: float) -> PsInitializer: ...
    @staticmethod
    def uniform(low: float, high: float) -> PsInitializer: ...
    @staticmethod
    def normal(mean: float, deviation: float) -> PsInitializer: ...

class PsConsistency:
    @staticmethod
    def sync(backup_workers: int) -> PsConsistency: ...
    @staticmethod
    def bounded(staleness: int) -> PsConsistency: ...
    @staticmethod
    def asynchronous() -> PsConsistency: ...
    @property
    def adds_workers(self) -> bool: ...
    @property
    def backup_workers(self) -> int: ...

class PsWork:
    def wait(self) -> tuple[int, int, int]: ...

class PsTable:
    @property
    def dim(self) -> int: ...
    def pull(self, keys: Array, out: Array) -> PsWork: ...
    def push(self, keys: Array, gradients: Array, lr: Optional[float]) -> PsWork: ...
    def push_pull(self, keys: Array, gradients: Array, out: Array, lr: Optional[float]) -> PsWork: ...
    def assign(self, keys: Array, rows: Array) -> PsWork: ...
    def erase(self, keys: Array) -> PsWork: ...
    def stats(self) -> dict[str, Any]: ...

class PsVariable:
    @property
    def elements(self) -> int: ...
    def pull(self, out: Array) -> PsWork: ...
    def push(self, gradients: Array, lr: Optional[float]) -> PsWork: ...
    def push_pull(self, gradients: Array, out: Array, lr: Optional[float]) -> PsWork: ...
    def assign(self, values: Array) -> PsWork: ...

class PsClient:
    def __init__(
        self,
        servers: list[str],
        worker: int,
        workers: int,
        secret_file: str,
        connect_timeout: float,
        timeout: float,
    ) -> None: ...
    @property
    def worker(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def now(self) -> int: ...
    @property
    def late_clocks(self) -> int: ...
    def table(
        self,
        name: str,
        dim: int,
        initializer: PsInitializer,
        optimizer: Union[PsSgd, PsAdagrad, PsRowAdagrad, PsAdam, PsAdamW, PsFtrl],
        consistency: PsConsistency,
        admission: int,
        max_age: int,
        max_rows: int,
        victim: str,
        seed: int,
    ) -> PsTable: ...
    def variable(
        self,
        name: str,
        elements: int,
        initial: float,
        optimizer: Union[PsSgd, PsAdagrad, PsRowAdagrad, PsAdam, PsAdamW, PsFtrl],
        consistency: PsConsistency,
    ) -> PsVariable: ...
    def clock(self) -> int: ...
    def barrier(self) -> None: ...
    def snapshot(self, folder: str, keep: int) -> str: ...
    def restore(self, folder: str) -> int: ...
    def leave(self) -> None: ...

class PsServer:
    def __init__(
        self,
        endpoint: str,
        secret_file: str,
        memory: int,
        patience: float,
        journal: str,
        replicas: Optional[int],
        of_job: bool,
    ) -> None: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def workers_gone(self) -> bool: ...

def first_non_finite(data: Array, wire_dtype: Any = None) -> Optional[int]: ...

class Forward:
    def __init__(self, samples: int, sync: bool) -> None: ...
    hooked: bool
    outputs: list[Any]

class GradientReducer:
    def __init__(
        self,
        comm: Communicator,
        parameters: list[tuple[str, str, list[int], list[int], int]],
        options: Any,
        hooks: Any,
    ) -> None: ...
    def lay_out(self) -> None: ...
    def buckets(self) -> list[tuple[Memory, list[int], list[int]]]: ...
    def slot_of(self, name: str) -> tuple[int, int, int, int]: ...
    @property
    def in_no_sync(self) -> bool: ...
    def enter_no_sync(self) -> None: ...
    def leave_no_sync(self) -> None: ...
    def add_forward(self, forward: Forward) -> None: ...
    def prepare_synchronising_pass(self) -> None: ...
    def require_whole(self) -> None: ...
    def begin_backward(self, forward: Forward) -> None: ...
    def receive(self, parameter: int) -> bool: ...
    def can_read(self, parameter: int) -> bool: ...
    def read_from(self, parameter: int, address: int, gradient: Any) -> None: ...
    def received(self, parameter: int) -> bool: ...
    def arrive(self, parameter: int) -> None: ...
    def finish(self) -> None: ...
    def reduce_without_backward(self) -> bool: ...
    @property
    def progress(self) -> int: ...
    def most_advanced(self) -> tuple[int, Optional[int]]: ...
    def take_plan_of(self, source: int, progress: int) -> None: ...
    def count_written(self) -> None: ...
    def count_moved(self) -> None: ...
    def count_parameter_comparison(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...

def require_same_on_all_ranks(comm: Communicator, lines: Sequence[str], who: str) -> None: ...
def require_same_parameters(
    comm: Communicator, named: Sequence[tuple[str, Sequence[int], int, Array, Callable[[int], str]]], step: int
) -> None: ...
def non_finite_text(
    rank: int, host: str, parameter: str, sizes: Sequence[int], index: int, value: float, step: int
) -> str: ...

REQUEUE_STATUS: int

class PreemptionSignals:
    def __init__(self, signals: Sequence[int]) -> None: ...
    def received(self) -> int: ...
    def say_yes(self, signal: int) -> None: ...

def permute(order: Array, seed: int, epoch: int) -> None: ...

def gpu_count() -> int: ...
def nccl_version() -> int: ...

class NamedResult:
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    def as_numpy(self) -> Any: ...
    def as_torch(self) -> Any: ...

class NamedWork:
    def wait(self, timeout: Optional[Seconds] = None) -> bool: ...
    def done(self) -> bool: ...
    def error(self) -> Optional[Exception]: ...
    def add_done_callback(self, fn: Callable[[NamedWork], object]) -> None: ...
    @property
    def result(self) -> Any: ...
    @property
    def received_splits(self) -> list[int]: ...
    @property
    def last_joined(self) -> int: ...
    @property
    def agreed_at(self) -> Optional[float]: ...
    @property
    def ended_at(self) -> Optional[float]: ...

class NamedEngine:
    def __init__(
        self,
        comm: Communicator,
        *,
        fusion_threshold: int = ...,
        cache_capacity: int = 4096,
        joined_average: str = "all",
        stall_after: Optional[Seconds] = 60.0,
        timeout: Optional[Seconds] = None,
        shutdown_timeout: Optional[Seconds] = 30.0,
    ) -> None: ...
    def rank(self) -> int: ...
    def size(self) -> int: ...
    def publish(self, number: int) -> None: ...
    def allocate(self, bytes: int) -> Memory: ...
    def all_reduce(
        self, name: str, input: Array, output: Array = None, *, op: Op = "average", prescale: float = 1.0, postscale: float = 1.0
    ) -> NamedWork: ...
    def all_reduce_group(
        self,
        names: Sequence[str],
        inputs: Sequence[Array],
        outputs: Optional[Sequence[Array]] = None,
        *,
        op: Op = "average",
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> list[NamedWork]: ...
    def all_gather(self, name: str, input: Array) -> NamedWork: ...
    def all_gather_group(
        self, names: Sequence[str], inputs: Sequence[Array], *, needs_all_ranks: bool = False
    ) -> list[NamedWork]: ...
    def broadcast(self, name: str, data: Array, root: int = 0) -> NamedWork: ...
    def broadcast_group(
        self, names: Sequence[str], data: Sequence[Array], root: int = 0, *, needs_all_ranks: bool = False
    ) -> list[NamedWork]: ...
    def reduce_scatter(
        self, name: str, input: Array, *, op: Op = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> NamedWork: ...
    def reduce_scatter_group(
        self, names: Sequence[str], inputs: Sequence[Array], *, op: Op = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> list[NamedWork]: ...
    def all_to_all(self, name: str, input: Array, splits: Optional[Iterable[int]] = None) -> NamedWork: ...
    def barrier(self, name: str) -> NamedWork: ...
    def join(self) -> NamedWork: ...
    def form_group(self, ranks: Sequence[int], timeout: Optional[Seconds] = None) -> Optional[Communicator]: ...
    def shutdown(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...

def role() -> str: ...
def role_number() -> int: ...
def num_workers() -> int: ...
def num_servers() -> int: ...
def announce_server(address: str) -> None: ...
def server_addresses(timeout: float = 60.0) -> list[str]: ...

class ClusterSpec:
    def __init__(self, cluster: Union[dict[str, Union[Sequence[str], dict[int, str]]], ClusterSpec]) -> None: ...
    @staticmethod
    def from_tf_config(text: str) -> ClusterSpec: ...
    def to_tf_config(self, task_type: str, task_index: int) -> str: ...
    @property
    def jobs(self) -> list[str]: ...
    def num_tasks(self, job_name: str) -> int: ...
    def task_indices(self, job_name: str) -> list[int]: ...
    def task_address(self, job_name: str, task_index: int) -> str: ...
    def job_tasks(self, job_name: str) -> list[Optional[str]]: ...
    def as_dict(self) -> dict[str, Union[list[Optional[str]], dict[int, str]]]: ...
    def __bool__(self) -> bool: ...
    def __eq__(self, other: object) -> bool: ...
