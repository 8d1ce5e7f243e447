#include "horovod/named/executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

namespace cohort::named {
namespace {

using comm::cuda::Gpu;
using comm::cuda::MarkPtr;
using Clock = std::chrono::steady_clock;

/// Keeps memory to which a copy that has not ended may still write, until the process ends.
void keep(std::vector<std::vector<std::byte>> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::vector<std::vector<std::byte>>>;
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

std::size_t bytes_of(const Signature& signature) noexcept {
  return static_cast<std::size_t>(signature.count()) * size_of(signature.dtype);
}

std::int64_t sum_of(std::span<const std::int64_t> counts) noexcept {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::vector<std::int64_t> times(std::span<const std::int64_t> rows, std::int64_t elements) {
  std::vector<std::int64_t> counts(rows.begin(), rows.end());
  for (std::int64_t& count : counts) count *= elements;
  return counts;
}

bool any(const std::vector<bool>& ranks) { return std::find(ranks.begin(), ranks.end(), true) != ranks.end(); }

template <class Options>
Options reduction_of(const Signature& common, bool manual) {
  Options options;
  options.op = manual && common.op == ReduceOp::Average ? ReduceOp::Sum : common.op;
  options.prescale = manual ? 1 : common.prescale;
  options.postscale = manual ? 1 : common.postscale;
  return options;
}

bool is_by_rows(Kind kind) noexcept {
  return kind == Kind::AllGather || kind == Kind::ReduceScatter || kind == Kind::AllToAll;
}

}  // namespace

std::chrono::milliseconds Executor::timeout() const {
  return stopping_ ? std::min(options_.shutdown_timeout, comm_.timeout()) : comm_.timeout();
}

void Executor::execute(std::vector<Ready> ready, RoundAnnouncer& announcer) {
  std::vector<Ready> wanted;
  const auto now = Clock::now();
  for (Ready& one : ready) {
    if (one.own) one.own->state->agreed_at = now;
    if (auto refused = refused_by_joined(*one.agreed, one.lacking)) {
      if (one.own) requests_.finish(std::span(&one.own, 1), refused);
      continue;
    }
    wanted.push_back(std::move(one));
  }
  // If averages skip ranks, the skipped ranks may differ between operations, so each such operation runs alone.
  std::vector<Ready> together;
  std::vector<Ready> alone;
  for (Ready& one : wanted) {
    const bool skips = options_.joined_average == JoinedAverage::ActiveRanks && any(one.lacking);
    (skips ? alone : together).push_back(std::move(one));
  }
  std::vector<AgreedPtr> operations;
  operations.reserve(together.size());
  for (const Ready& one : together) operations.push_back(one.agreed);
  std::vector<Ready> batch;
  for (const Batch& indices : plan_fusion(operations, options_.fusion_threshold)) {
    batch.clear();
    for (const std::size_t index : indices) batch.push_back(std::move(together[index]));
    run_batch(batch, announcer);
  }
  for (const Ready& one : alone) run_batch(std::span(&one, 1), announcer);
}

void Executor::run_batch(std::span<const Ready> batch, RoundAnnouncer& announcer) {
  std::optional<Error> failed;
  try {
    if (batch.front().agreed->common.device == DeviceType::CPU) {
      carry_out(batch);
    } else {
      run_on_gpu(batch, announcer);
    }
  } catch (const Error& error) {
    // These errors occur on all ranks. Any other error ends the engine, since the other ranks wait for this one.
    const bool bad_list =
        error.code() == ErrorCode::InvalidArgument && batch.front().agreed->common.kind == Kind::Group;
    if (error.code() != ErrorCode::Mismatch && !bad_list) throw;
    failed = error;
  }
  scratch_.clear();
  if (batch.front().agreed->common.kind != Kind::Barrier) batches_.fetch_add(1, std::memory_order_relaxed);
  std::vector<PendingPtr> done;
  done.reserve(batch.size());
  for (const Ready& one : batch) done.push_back(one.own);
  requests_.finish(done, failed);
}

void Executor::carry_out(std::span<const Ready> batch) {
  switch (batch.front().agreed->common.kind) {
    case Kind::AllReduce: return run_reductions(batch);
    case Kind::Broadcast: return run_broadcasts(batch);
    case Kind::AllGather: return run_all_gather(batch.front());
    case Kind::ReduceScatter: return run_reduce_scatter(batch.front());
    case Kind::AllToAll: return run_all_to_all(batch.front());
    case Kind::Group: return run_group(batch.front());
    case Kind::Barrier:
    case Kind::Join: return;  // nothing to do: all ranks have arrived
  }
}

/// Returns host memory, until the end of the batch, for ranks that have no memory for a result.
std::byte* Executor::scratch(std::size_t bytes) {
  return scratch_.emplace_back(std::max<std::size_t>(bytes, 1)).data();
}

/// Returns the buffer for this rank's result.
Buffer Executor::place(const Ready& one, std::vector<std::int64_t> shape) {
  Signature result;
  result.dtype = one.agreed->common.dtype;
  result.shape = std::move(shape);
  const std::int64_t count = result.count();
  if (count < 0) raise(ErrorCode::Unavailable, "'{}': the result has too many elements", one.agreed->name);
  const std::size_t bytes = bytes_of(result);
  if (!one.own) return {scratch(bytes), count, result.dtype};
  Outcome& outcome = one.own->state->result;
  outcome.dtype = result.dtype;
  const Device device = one.own->request.input.device;
  try {
    if (one.own->request.allocate) {
      outcome.data = one.own->request.allocate(result.shape);
      if (outcome.data == nullptr && count > 0) throw std::bad_alloc();
      if (device.type != DeviceType::CPU) follow_caller(*one.own);
    } else if (device.type != DeviceType::CPU) {
      const auto memory = std::make_shared<Memory>(comm_.allocate(bytes, device));
      outcome.data = memory->data();
      outcome.owner = memory;
    } else {
      // Aligned to cache lines, as array libraries prefer.
      constexpr std::align_val_t kAlignment{64};
      outcome.data = ::operator new(std::max<std::size_t>(bytes, 1), kAlignment);
      outcome.owner = std::shared_ptr<void>(outcome.data, [](void* data) { ::operator delete(data, kAlignment); });
    }
  } catch (const std::exception& error) {
    // The other ranks are about to carry the operation out, and cannot continue without this rank.
    raise(ErrorCode::Unavailable, "{} '{}' failed -- rank {} -- no memory for a result of {} bytes: {}",
          name_of(one.agreed->common.kind), one.agreed->name, rank_, bytes, error.what());
  } catch (...) {
    raise(ErrorCode::Unavailable, "{} '{}' failed -- rank {} -- no memory for a result of {} bytes",
          name_of(one.agreed->common.kind), one.agreed->name, rank_, bytes);
  }
  outcome.shape = std::move(result.shape);
  return {outcome.data, count, result.dtype, device};
}

void Executor::run_reductions(std::span<const Ready> batch) {
  const Signature& common = batch.front().agreed->common;
  const std::vector<bool>& lacking = batch.front().lacking;
  const bool average = common.op == ReduceOp::Average;
  const bool skips = average && options_.joined_average == JoinedAverage::ActiveRanks && any(lacking);
  const bool manual = by_hand(common, skips);
  auto options = reduction_of<AllReduceOptions>(common, manual);
  options.wire_format = common.wire_format;
  options.timeout = timeout();
  if (skips && !manual) options.weight = lacking[static_cast<std::size_t>(rank_)] ? 0.0 : 1.0;
  std::vector<Buffer> buffers;
  buffers.reserve(batch.size());
  for (const Ready& one : batch) {
    const Signature& wanted = one.agreed->common;
    if (one.own) {
      buffers.push_back(one.own->request.output);
    } else {
      buffers.emplace_back(scratch(bytes_of(wanted)), wanted.count(), wanted.dtype);
      fill_neutral(buffers.back(), options.op, wanted.prescale);
    }
  }
  const bool alone = batch.size() == 1;
  if (alone && batch.front().own && !manual) {
    comm_.all_reduce(batch.front().own->request.input, buffers.front(), options).wait();
  } else if (alone && !manual) {
    comm_.all_reduce(buffers.front(), options).wait();
  } else {
    for (std::size_t i = 0; i < batch.size(); ++i) {
      if (batch[i].own) copy_over(batch[i].own->request.input, buffers[i]);
      if (batch[i].own && manual) scale(buffers[i], common.prescale);
    }
    comm_.all_reduce(buffers, options).wait();
  }
  if (!manual) return;
  const std::int64_t ranks = skips ? std::count(lacking.begin(), lacking.end(), false) : size_;
  for (const Buffer& one : buffers) scale(one, common.postscale, average ? ranks : 1);
}

void Executor::run_broadcasts(std::span<const Ready> batch) {
  const Signature& common = batch.front().agreed->common;
  BroadcastOptions options;
  options.root = common.root;
  options.timeout = timeout();
  std::vector<Buffer> buffers;
  buffers.reserve(batch.size());
  for (const Ready& one : batch) {
    const Signature& wanted = one.agreed->common;
    if (!one.own) {
      buffers.emplace_back(scratch(bytes_of(wanted)), wanted.count(), wanted.dtype);
      continue;
    }
    buffers.push_back(one.own->request.output);
    if (rank_ == common.root) copy_over(one.own->request.input, buffers.back());
  }
  comm_.broadcast(buffers, options).wait();
}

void Executor::run_all_gather(const Ready& one) {
  const Agreed& agreed = *one.agreed;
  const std::int64_t elements = agreed.row_elements();
  std::vector<std::int64_t> rows = agreed.rows;
  for (std::size_t rank = 0; rank < rows.size(); ++rank) {
    if (one.lacking[rank]) rows[rank] = 0;
  }
  std::vector<std::int64_t> shape = agreed.common.shape;
  shape[0] = sum_of(rows);
  const Buffer output = place(one, std::move(shape));
  if (one.own) one.own->state->result.received_splits = rows;
  if (output.count == 0) return;  // empty on all ranks
  const ConstBuffer input = one.own ? one.own->request.input : ConstBuffer(nullptr, 0, output.dtype);
  AllGatherOptions options;
  options.timeout = timeout();
  comm_.all_gather_v(input, output, times(rows, elements), options).wait();
}

// No rank lacks reduce_scatter or all_to_all.
void Executor::run_reduce_scatter(const Ready& one) {
  const Signature& common = one.agreed->common;
  const std::vector<std::int64_t> rows = scattered_rows(common.shape[0], size_);
  std::vector<std::int64_t> shape = common.shape;
  shape[0] = rows[static_cast<std::size_t>(rank_)];
  const Buffer output = place(one, std::move(shape));
  if (common.count() == 0) return;
  const bool manual = by_hand(common, false);
  auto options = reduction_of<ReduceScatterOptions>(common, manual);
  options.wire_format = common.wire_format;
  options.timeout = timeout();
  ConstBuffer input = one.own->request.input;
  if (manual && common.prescale != 1) {
    const Buffer scaled{scratch(bytes_of(common)), input.count, input.dtype};
    copy_over(input, scaled);
    scale(scaled, common.prescale);
    input = scaled;
  }
  comm_.reduce_scatter_v(input, output, times(rows, one.agreed->row_elements()), options).wait();
  if (manual) scale(output, common.postscale, common.op == ReduceOp::Average ? size_ : 1);
}

void Executor::run_all_to_all(const Ready& one) {
  const Agreed& agreed = *one.agreed;
  const auto own = static_cast<std::size_t>(rank_);
  std::vector<std::int64_t> received;
  for (const auto& splits : agreed.splits) received.push_back(splits[own]);
  std::vector<std::int64_t> shape = agreed.common.shape;
  shape[0] = sum_of(received);
  const Buffer output = place(one, std::move(shape));
  const std::int64_t elements = agreed.row_elements();
  AllToAllOptions options;
  options.timeout = timeout();
  comm_
      .all_to_all_v(one.own->request.input, times(agreed.splits[own], elements), output, times(received, elements),
                    options)
      .wait();
  one.own->state->result.received_splits = std::move(received);
}

void Executor::run_group(const Ready& one) {
  std::vector<int> ranks;
  for (const std::int64_t rank : one.agreed->common.splits) ranks.push_back(static_cast<int>(rank));
  GroupOptions options;
  options.timeout = timeout();
  one.own->state->result.group = comm_.group(ranks, options);
}

// --- GPU memory ---

// An operation on GPU memory is carried out by the communicator if each rank has its data on a GPU. If ranks have
// joined and so have no data, or if integers are scaled, a batch is copied through host memory on all ranks.

/// Copies within host memory immediately, within GPU memory in the engine's stream.
void Executor::copy_over(const ConstBuffer& from, const Buffer& to) {
  if (from.data == nullptr || from.data == to.data || to.count == 0) return;
  if (to.device.type == DeviceType::CPU) {
    std::memmove(to.data, from.data, to.bytes());
  } else {
    Gpu::at(to.device.index).copy_within(to.data, from.data, to.bytes(), to.device.stream);
  }
}

/// Orders the engine's stream after the caller's, because work queued there may still use memory that the allocator
/// hands out for that stream.
void Executor::follow_caller(const Pending& own) {
  Gpu& gpu = Gpu::at(own.device.index);
  refuse_capture(gpu, own.device.stream, own.request, rank_);
  streams_.after(own.device.index, {gpu.mark(own.device.stream)});
}

void Executor::run_on_gpu(std::span<const Ready> batch, RoundAnnouncer& announcer) {
  const Signature& common = batch.front().agreed->common;
  const bool lacked = std::any_of(batch.begin(), batch.end(), [](const Ready& one) { return any(one.lacking); });
  for (const Ready& one : batch) {
    if (!one.own) continue;
    Request& request = one.own->request;
    void* const stream = streams_.after(one.own->device.index, one.own->marks);
    request.input.device.stream = request.output.device.stream = stream;
  }
  if (lacked || by_hand(common, false)) return run_on_host(batch, announcer);
  // A communicator of one rank would copy to the host and back.
  if (size_ > 1 || common.prescale != 1 || common.postscale != 1) return carry_out(batch);
  for (const Ready& one : batch) run_alone(one);
}

void Executor::run_alone(const Ready& one) {
  const Request& request = one.own->request;
  const Device device = device_of(request);
  if (is_by_rows(request.kind)) {
    copy_over(request.input, place(one, request.shape));
    if (request.kind != Kind::ReduceScatter) one.own->state->result.received_splits = {request.shape[0]};
  } else {
    copy_over(request.input, request.output);
  }
  Gpu& gpu = Gpu::at(device.index);
  gpu.wait(*gpu.mark(device.stream), Clock::now() + timeout());  // there are no peers to watch meanwhile
}

void Executor::run_on_host(std::span<const Ready> batch, RoundAnnouncer& announcer) {
  const auto deadline = Clock::now() + timeout();
  std::vector<std::pair<Gpu*, MarkPtr>> copies;
  const auto wait_for_copies = [&] {
    try {
      for (const auto& [gpu, copy] : std::exchange(copies, {})) {
        gpu->wait(*copy, deadline, [&] { static_cast<void>(announcer.heard()); });  // throws what ends the world
      }
    } catch (const Error&) {
      keep(std::move(scratch_));
      throw;
    }
  };
  // Copies of the operations, in place in host memory.
  std::vector<Ready> hosted(batch.begin(), batch.end());
  for (Ready& one : hosted) {
    if (!one.own) continue;
    auto twin = std::make_shared<Pending>(*one.own);
    twin->state = std::make_shared<State>(requests_.wakeup(), twin->request.name);
    Request& request = twin->request;
    const ConstBuffer brought = request.input.data != nullptr ? request.input : ConstBuffer(request.output);
    const Buffer room{scratch(brought.bytes()), brought.count, brought.dtype};
    Gpu& gpu = Gpu::at(one.own->device.index);
    const bool is_read = request.kind != Kind::Broadcast || rank_ == request.root;
    if (is_read && brought.count > 0) {
      const MarkPtr ready = gpu.mark(brought.device.stream);
      copies.emplace_back(&gpu, gpu.copy_to_host(room.data, brought.data, brought.bytes(), *ready));
    }
    request.input = room;
    if (!is_by_rows(request.kind)) request.output = room;
    request.allocate = {};
    one.own = std::move(twin);
  }
  wait_for_copies();
  carry_out(hosted);
  for (std::size_t i = 0; i < batch.size(); ++i) {
    if (!batch[i].own) continue;
    const Request& request = batch[i].own->request;
    // The root's data is already in its output buffer.
    if (request.kind == Kind::Broadcast && rank_ == request.root && request.input.data == nullptr) continue;
    const void* from = hosted[i].own->request.output.data;
    Buffer to = request.output;
    if (is_by_rows(request.kind)) {
      Outcome& made = hosted[i].own->state->result;
      to = place(batch[i], made.shape);
      from = made.data;
      batch[i].own->state->result.received_splits = std::move(made.received_splits);
    }
    if (to.count == 0) continue;
    Gpu& gpu = Gpu::at(batch[i].own->device.index);
    const MarkPtr ready = gpu.mark(to.device.stream);
    copies.emplace_back(&gpu, gpu.copy_to_device(to.data, from, to.bytes(), *ready));
  }
  wait_for_copies();
}

}  // namespace cohort::named
