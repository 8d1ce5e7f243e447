#include "bench/operation.h"

#include "bench/values.h"
#include "comm/cuda/driver.h"

#include <cstring>

namespace cohort::app::bench {
namespace {

constexpr int kGarbage = 0xA5;
constexpr auto kNever = comm::Staging::Clock::time_point::max();  // nothing else is in the GPU's default stream

bool brings(const Operation& operation, int rank) {
  switch (operation.collective) {
    case Collective::Broadcast:
    case Collective::Scatter: return rank == operation.root;
    case Collective::PingPong: return rank < 2;
    default: return true;
  }
}

bool receives(const Operation& operation, int rank) {
  switch (operation.collective) {
    case Collective::Reduce:
    case Collective::Gather: return rank == operation.root;
    case Collective::PingPong: return rank < 2;
    case Collective::Barrier: return false;
    default: return true;
  }
}

std::size_t bytes_of(const Operation& operation, std::int64_t count) {
  return static_cast<std::size_t>(count) * size_of(operation.dtype);
}

/// What is in the mirror is in the GPU's buffers then. In place they share bytes, and so does the mirror.
void to_gpu(const Operation& operation) {
  if (operation.device.type != DeviceType::CUDA) return;
  auto& gpu = comm::cuda::Gpu::at(operation.device.index);
  const auto copy = [&](std::byte* to, const std::byte* from, std::int64_t count) {
    if (count == 0) return;
    gpu.wait(*gpu.copy_to_device(to, from, bytes_of(operation, count), *gpu.mark(nullptr)), kNever);
  };
  copy(operation.buffers.output, operation.mirror.output, operation.shape.output);
  copy(operation.buffers.input, operation.mirror.input, operation.shape.input);
}

/// What came out is in the mirror then.
void from_gpu(const Operation& operation) {
  if (operation.device.type != DeviceType::CUDA || operation.shape.output == 0) return;
  auto& gpu = comm::cuda::Gpu::at(operation.device.index);
  gpu.wait(*gpu.copy_to_host(operation.mirror.output, operation.buffers.output,
                             bytes_of(operation, operation.shape.output), *gpu.mark(nullptr)),
           kNever);
}

void ping_pong(Communicator& comm, const ConstBuffer& input, const Buffer& output) {
  if (comm.rank() == 0) {
    comm.send(input, 1).wait();
    comm.recv(output, 1).wait();
  } else if (comm.rank() == 1) {
    comm.recv(output, 0).wait();
    comm.send(input, 0).wait();
  }
}

void exchange(Communicator& comm, const ConstBuffer& input, const Buffer& output) {
  Work sent = comm.send(input, (comm.rank() + 1) % comm.size());
  comm.recv(output, (comm.rank() + comm.size() - 1) % comm.size()).wait();
  sent.wait();
}

}  // namespace

void call(Communicator& comm, const Operation& operation) {
  const Shape& shape = operation.shape;
  const ConstBuffer input(operation.buffers.input, shape.input, operation.dtype, operation.device);
  const Buffer output(operation.buffers.output, shape.output, operation.dtype, operation.device);
  const int root = operation.root;
  const bool is_root = comm.rank() == root;
  const ConstBuffer no_input(nullptr, 0, operation.dtype, operation.device);
  const Buffer no_output(nullptr, 0, operation.dtype, operation.device);
  const ReduceOptions to_root = {.root = root, .op = operation.op, .gpu_sums = operation.gpu_sums};
  const ReduceScatterOptions to_parts = {.op = operation.op, .gpu_sums = operation.gpu_sums};
  switch (operation.collective) {
    case Collective::AllReduce:
      comm.all_reduce(input, output, {.op = operation.op, .gpu_sums = operation.gpu_sums}).wait();
      break;
    case Collective::Reduce:
      if (operation.in_place) {
        comm.reduce(output, to_root).wait();
      } else {
        comm.reduce(input, is_root ? output : no_output, to_root).wait();
      }
      break;
    case Collective::Broadcast: comm.broadcast(output, {.root = root}).wait(); break;
    case Collective::AllGather: comm.all_gather(input, output).wait(); break;
    case Collective::AllGatherV: comm.all_gather_v(input, output, shape.input_parts).wait(); break;
    case Collective::Gather: comm.gather(input, is_root ? output : no_output, {.root = root}).wait(); break;
    case Collective::Scatter: comm.scatter(is_root ? input : no_input, output, {.root = root}).wait(); break;
    case Collective::ReduceScatter: comm.reduce_scatter(input, output, to_parts).wait(); break;
    case Collective::ReduceScatterV: comm.reduce_scatter_v(input, output, shape.input_parts, to_parts).wait(); break;
    case Collective::AllToAll: comm.all_to_all(input, output).wait(); break;
    case Collective::AllToAllV: comm.all_to_all_v(input, shape.input_parts, output, shape.output_parts).wait(); break;
    case Collective::PingPong: ping_pong(comm, input, output); break;
    case Collective::Exchange: exchange(comm, input, output); break;
    case Collective::Barrier: comm.barrier().wait(); break;
  }
}

void write_input(const Communicator& comm, const Operation& operation) {
  // In place, the output holds the input: first the one, then the other.
  if (operation.shape.output > 0)
    std::memset(operation.mirror.output, kGarbage, bytes_of(operation, operation.shape.output));
  if (brings(operation, comm.rank())) {
    fill(operation.mirror.input, operation.shape.input, operation.dtype,
         input_tile(operation.dtype, operation.op, comm.rank()));
  }
  to_gpu(operation);
}

void clear(const Operation& operation) {
  const auto zero = [&](std::byte* data, std::int64_t count) {
    if (count > 0) std::memset(data, 0, bytes_of(operation, count));
  };
  zero(operation.mirror.input, operation.shape.input);
  zero(operation.mirror.output, operation.shape.output);
  to_gpu(operation);
}

std::int64_t wrong_elements(const Communicator& comm, const Operation& operation) {
  const DType dtype = operation.dtype;
  const Shape& shape = operation.shape;
  const int rank = comm.rank();
  const int ranks = comm.size();
  if (!receives(operation, rank)) return 0;
  from_gpu(operation);
  const auto whole = [&](const Tile& tile, std::int64_t first) {
    return count_wrong(operation.mirror.output, shape.output, dtype, tile, first);
  };
  const auto input_of = [&](int source) { return input_tile(dtype, operation.op, source); };
  const std::size_t element = size_of(dtype);

  switch (operation.collective) {
    case Collective::AllReduce:
    case Collective::Reduce: return whole(reduced_tile(dtype, operation.op, ranks), 0);
    case Collective::ReduceScatter:
    case Collective::ReduceScatterV: return whole(reduced_tile(dtype, operation.op, ranks), shape.own_part);
    case Collective::Broadcast: return whole(input_of(operation.root), 0);
    case Collective::Scatter: return whole(input_of(operation.root), shape.own_part);
    case Collective::PingPong: return whole(input_of(1 - rank), 0);
    case Collective::Exchange: return whole(input_of((rank + ranks - 1) % ranks), 0);
    case Collective::Barrier: return 0;
    default: break;
  }
  // Parts of all ranks, one after the other.
  std::int64_t wrong = 0;
  std::int64_t at = 0;
  for (int source = 0; source < ranks; ++source) {
    const std::int64_t count = shape.output_parts[static_cast<std::size_t>(source)];
    std::int64_t first = 0;
    if (operation.collective == Collective::AllToAll || operation.collective == Collective::AllToAllV) {
      const Shape theirs = shape_of(operation.collective, shape.bytes, dtype, source, ranks);
      for (int part = 0; part < rank; ++part) first += theirs.input_parts[static_cast<std::size_t>(part)];
    }
    wrong += count_wrong(operation.mirror.output + static_cast<std::size_t>(at) * element, count, dtype,
                         input_of(source), first);
    at += count;
  }
  return wrong;
}

}  // namespace cohort::app::bench
