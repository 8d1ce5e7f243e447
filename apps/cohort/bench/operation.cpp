#include "bench/operation.h"

#include "bench/values.h"

#include <cstring>
#include <optional>

namespace cohort::app::bench {
namespace {

constexpr int kGarbage = 0xA5;

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
  const ConstBuffer input(operation.buffers.input, shape.input, operation.dtype);
  const Buffer output(operation.buffers.output, shape.output, operation.dtype);
  const int root = operation.root;
  const bool is_root = comm.rank() == root;
  const ConstBuffer no_input(nullptr, 0, operation.dtype);
  const Buffer no_output(nullptr, 0, operation.dtype);
  switch (operation.collective) {
    case Collective::AllReduce: comm.all_reduce(input, output, {.op = operation.op}).wait(); break;
    case Collective::Reduce:
      if (operation.in_place) {
        comm.reduce(output, {.root = root, .op = operation.op}).wait();
      } else {
        comm.reduce(input, is_root ? output : no_output, {.root = root, .op = operation.op}).wait();
      }
      break;
    case Collective::Broadcast: comm.broadcast(output, {.root = root}).wait(); break;
    case Collective::AllGather: comm.all_gather(input, output).wait(); break;
    case Collective::AllGatherV: comm.all_gather_v(input, output, shape.input_parts).wait(); break;
    case Collective::Gather: comm.gather(input, is_root ? output : no_output, {.root = root}).wait(); break;
    case Collective::Scatter: comm.scatter(is_root ? input : no_input, output, {.root = root}).wait(); break;
    case Collective::ReduceScatter: comm.reduce_scatter(input, output, {.op = operation.op}).wait(); break;
    case Collective::ReduceScatterV:
      comm.reduce_scatter_v(input, output, shape.input_parts, {.op = operation.op}).wait();
      break;
    case Collective::AllToAll: comm.all_to_all(input, output).wait(); break;
    case Collective::AllToAllV: comm.all_to_all_v(input, shape.input_parts, output, shape.output_parts).wait(); break;
    case Collective::PingPong: ping_pong(comm, input, output); break;
    case Collective::Exchange: exchange(comm, input, output); break;
    case Collective::Barrier: comm.barrier().wait(); break;
  }
}

void write_input(const Communicator& comm, const Operation& operation) {
  const std::size_t element = size_of(operation.dtype);
  // In place, the output holds the input: first the one, then the other.
  if (operation.shape.output > 0) {
    std::memset(operation.buffers.output, kGarbage, static_cast<std::size_t>(operation.shape.output) * element);
  }
  if (brings(operation, comm.rank())) {
    fill(operation.buffers.input, operation.shape.input, operation.dtype,
         input_tile(operation.dtype, operation.op, comm.rank()));
  }
}

std::int64_t wrong_elements(const Communicator& comm, const Operation& operation) {
  const DType dtype = operation.dtype;
  const Shape& shape = operation.shape;
  const int rank = comm.rank();
  const int ranks = comm.size();
  if (!receives(operation, rank)) return 0;
  const auto whole = [&](const Tile& tile, std::int64_t first) {
    return count_wrong(operation.buffers.output, shape.output, dtype, tile, first);
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
    wrong += count_wrong(operation.buffers.output + static_cast<std::size_t>(at) * element, count, dtype,
                         input_of(source), first);
    at += count;
  }
  return wrong;
}

}  // namespace cohort::app::bench
