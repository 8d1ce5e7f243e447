#include "train/named/execution.h"

#include "comm/gpu/driver.h"
#include "comm/gpu/nccl.h"
#include "train/named/engine_core.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace cohort::named {

using comm::cuda::Gpu;
using comm::cuda::Nccl;
using comm::cuda::Stream;

namespace {

void refuse_capture(const Gpu& gpu, Stream stream, const Request& request, int rank) {
  gpu.refuse_capture(
      stream, [&] { return fmt::format("{} '{}' failed -- rank {}", name_of(request.kind), request.name, rank); });
}

}  // namespace

Marks marks_of(const Request& request, int rank) {
  Marks marks;
  const Device device = device_of(request);
  if (device.type == DeviceType::CPU) return marks;
  std::vector<Stream> streams{device.stream};
  for (const Device& other : {request.input.device, request.output.device}) {
    if (other.type != DeviceType::CPU && other.stream != device.stream) streams.push_back(other.stream);
  }
  Gpu& gpu = Gpu::at(device.index);
  for (const Stream stream : streams) refuse_capture(gpu, stream, request, rank);
  for (const Stream stream : streams) marks.push_back(gpu.mark(stream));
  return marks;
}

GpuStreams::~GpuStreams() {
  for (const auto& [gpu, stream] : streams_) Gpu::at(gpu).end_stream(stream);
}

Stream GpuStreams::after(int gpu, const Marks& marks) {
  Gpu& on = Gpu::at(gpu);
  auto found = streams_.find(gpu);
  if (found == streams_.end()) found = streams_.emplace(gpu, on.make_stream()).first;
  for (const auto& mark : marks) on.put_after(found->second, *mark);
  return found->second;
}

int gpu_count() noexcept { return Gpu::count().value_or(0); }

int nccl_version() {
  const Result<Nccl>& found = Nccl::find();
  return found ? found->version : 0;
}

// Carries out operations on GPU memory: by the communicator if each rank has its data on a GPU. If ranks have joined,
// and so have no data, or if integers are scaled, a batch is copied through host memory on all ranks.

using comm::cuda::MarkPtr;

namespace {

bool is_by_rows(Kind kind) noexcept {
  return kind == Kind::AllGather || kind == Kind::ReduceScatter || kind == Kind::AllToAll;
}

}  // namespace

/// Copies within host memory immediately, within GPU memory in the engine's stream.
void EngineCore::copy_over(const ConstBuffer& from, const Buffer& to) {
  if (from.data == nullptr || from.data == to.data || to.count == 0) return;
  if (to.device.type == DeviceType::CPU) {
    std::memmove(to.data, from.data, to.bytes());
  } else {
    Gpu::at(to.device.index).copy_within(to.data, from.data, to.bytes(), to.device.stream);
  }
}

/// Orders the engine's stream after the caller's: work queued there may still use memory that the allocator hands out
/// for that stream.
void EngineCore::follow_caller(const Pending& own) {
  Gpu& gpu = Gpu::at(own.device.index);
  refuse_capture(gpu, own.device.stream, own.request, rank_);
  streams_.after(own.device.index, {gpu.mark(own.device.stream)});
}

void EngineCore::run_on_gpu(std::span<const Ready> batch) {
  const Signature& common = batch.front().agreed->common;
  const bool lacked = std::any_of(batch.begin(), batch.end(), [](const Ready& one) {
    return std::find(one.lacking.begin(), one.lacking.end(), true) != one.lacking.end();
  });
  for (const Ready& one : batch) {
    if (!one.own) continue;
    Request& request = one.own->request;
    void* const stream = streams_.after(one.own->device.index, one.own->marks);
    request.input.device.stream = request.output.device.stream = stream;
  }
  if (lacked || by_hand(common, false)) return run_on_host(batch);
  // A communicator of one rank would copy to the host and back.
  if (size_ > 1 || common.prescale != 1 || common.postscale != 1) return carry_out(batch);
  for (const Ready& one : batch) run_alone(one);
}

void EngineCore::run_alone(const Ready& one) {
  const Request& request = one.own->request;
  const Device device = device_of(request);
  if (is_by_rows(request.kind)) {
    copy_over(request.input, place(one, request.shape));
    if (request.kind != Kind::ReduceScatter) one.own->state->result.received_splits = {request.shape[0]};
  } else {
    copy_over(request.input, request.output);
  }
  Gpu& gpu = Gpu::at(device.index);
  gpu.wait(*gpu.mark(device.stream), Clock::now() + operation_timeout());  // there are no peers to watch meanwhile
}

void EngineCore::run_on_host(std::span<const Ready> batch) {
  const auto deadline = Clock::now() + operation_timeout();
  std::vector<std::pair<Gpu*, MarkPtr>> copies;
  const auto wait_for_copies = [&] {
    try {
      for (const auto& [gpu, copy] : std::exchange(copies, {})) {
        gpu->wait(*copy, deadline, [this] { static_cast<void>(announcer_->heard()); });  // throws what ends the world
      }
    } catch (const Error&) {
      static_cast<void>(new auto(std::move(scratch_)));  // a copy may still use it
      throw;
    }
  };
  // Copies of the operations, in place in host memory.
  std::vector<Ready> hosted(batch.begin(), batch.end());
  for (Ready& one : hosted) {
    if (!one.own) continue;
    auto twin = std::make_shared<Pending>(*one.own);
    twin->state = std::make_shared<State>(wakeup_, twin->request.name);
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
