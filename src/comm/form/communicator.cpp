#include <cohort/communicator.h>

#include "base/result.h"
#include "comm/api/communicator_impl.h"
#include "comm/api/work_state.h"
#include "comm/gpu/device_communicator.h"

#include <utility>

namespace cohort {
namespace {

using comm::Caller;
using comm::Kind;
using Request = comm::DeviceRequest;

comm::DeviceCommunicator& need(const std::shared_ptr<comm::DeviceCommunicator>& impl) {
  if (!impl) {
    raise(ErrorCode::InvalidArgument, "this Communicator belongs to no world -- form one with cohort::init() first");
  }
  return *impl;
}

template <class Options>
Request make_request(const Caller& caller, const ConstBuffer& input, const Buffer& output, const Options& options) {
  comm::check_timeout(caller, options.timeout);
  Request request;
  request.kind = caller.kind;
  request.dtype = output.dtype;
  request.input = input.data;
  request.output = output.data;
  request.input_count = input.count;
  request.output_count = output.count;
  request.timeout = options.timeout.value_or(std::chrono::milliseconds(0));
  // A rank without input and output still names a device, which has to be the same as the other ranks'.
  const bool by_output = output.count > 0 || (input.count == 0 && output.device.type != DeviceType::CPU);
  request.device = by_output ? output.device : input.device;
  request.input_stream = input.count > 0 ? input.device.stream : request.device.stream;
  return request;
}

void check_buffers(const Caller& caller, const ConstBuffer& input, const Buffer& output) {
  comm::check_buffer(caller, "the input", input);
  comm::check_buffer(caller, "the output", output);
  comm::check_same_type(caller, input, output);
}

template <class Options>
void set_reduction(const Caller& caller, Request& request, const Options& options) {
  comm::check_reduction(caller, request.dtype, options.op, options.prescale, options.postscale);
  request.op = options.op;
  request.prescale = options.prescale;
  request.postscale = options.postscale;
  request.gpu_sums = options.gpu_sums;
}

template <class Options>
void set_weight(const Caller& caller, Request& request, const Options& options) {
  if (!options.weight) return;
  comm::check_weight(caller, request.dtype, options.op, *options.weight);
  request.weighted = true;
  request.weight = *options.weight;
}

template <class Options>
void set_wire_format(const Caller& caller, Request& request, const Options& options) {
  comm::check_wire_format(caller, request.dtype, request.op, options.wire_format, options.residual);
  request.wire_format = options.wire_format;
  request.residual = options.residual;
  if (request.residual != nullptr && request.device.type != DeviceType::CPU && request.kind != Kind::AllReduce)
    comm::refuse_argument(caller, "a residual of a GPU's memory goes with all_reduce");
}

std::shared_ptr<const comm::Counts> keep(std::span<const std::int64_t> input,
                                         std::span<const std::int64_t> output = {}) {
  return std::make_shared<const comm::Counts>(
      comm::Counts{{input.begin(), input.end()}, {output.begin(), output.end()}});
}

/// Offset of a part in a buffer of parts, in bytes.
std::size_t offset_of(std::span<const std::int64_t> counts, int part, DType dtype) {
  std::int64_t before = 0;
  for (const std::int64_t count : counts.first(static_cast<std::size_t>(part))) before += count;
  return static_cast<std::size_t>(before) * size_of(dtype);
}

const void* at(const void* data, std::size_t offset) noexcept { return static_cast<const std::byte*>(data) + offset; }

Request all_reduce_request(const Caller& caller, ConstBuffer input, Buffer output, const AllReduceOptions& options) {
  check_buffers(caller, input, output);
  if (input.count != output.count) {
    comm::refuse_argument(caller,
                          fmt::format("the input has {} elements and the output {}", input.count, output.count));
  }
  comm::check_apart(caller, input, output, output.data);
  Request request = make_request(caller, input, output, options);
  set_reduction(caller, request, options);
  set_weight(caller, request, options);
  set_wire_format(caller, request, options);
  request.tag = static_cast<std::int32_t>(options.tag);
  if (options.check_finite) request.finite_check = std::make_shared<comm::FiniteCheck>(output);
  return request;
}

Request reduce_scatter_request(const Caller& caller, ConstBuffer input, Buffer output,
                               const ReduceScatterOptions& options) {
  check_buffers(caller, input, output);
  comm::check_parts(caller, "the input", input.count, "the output", output.count);
  // The operation is in place if the output is this rank's part of the input.
  const void* const own = at(input.data, static_cast<std::size_t>(caller.rank()) * output.bytes());
  comm::check_apart(caller, input, output, output.data == own ? input.data : nullptr);
  Request request = make_request(caller, input, output, options);
  set_reduction(caller, request, options);
  set_weight(caller, request, options);
  set_wire_format(caller, request, options);
  return request;
}

Request all_gather_request(const Caller& caller, ConstBuffer input, Buffer output, const AllGatherOptions& options) {
  check_buffers(caller, input, output);
  comm::check_parts(caller, "the output", output.count, "the input", input.count);
  comm::check_apart(caller, input, output, at(output.data, static_cast<std::size_t>(caller.rank()) * input.bytes()));
  return make_request(caller, input, output, options);
}

Request broadcast_request(const Caller& caller, Buffer data, const BroadcastOptions& options) {
  comm::check_buffer(caller, "the buffer", data);
  comm::check_root(caller, options.root);
  Request request = make_request(caller, data, data, options);
  request.root = options.root;
  return request;
}

/// Only the root's output is used.
Request gather_request(const Caller& caller, ConstBuffer input, Buffer output, const GatherOptions& options) {
  if (caller.rank() != options.root) output = Buffer(nullptr, 0, input.dtype);
  Request request = make_request(caller, input, output, options);
  request.root = options.root;
  return request;
}

/// Only the root's input is used.
Request scatter_request(const Caller& caller, ConstBuffer input, Buffer output, const ScatterOptions& options) {
  if (caller.rank() != options.root) input = ConstBuffer(nullptr, 0, output.dtype);
  Request request = make_request(caller, input, output, options);
  request.root = options.root;
  return request;
}

void check_same_length(const Caller& caller, std::size_t inputs, std::size_t outputs) {
  if (inputs != outputs) {
    comm::refuse_argument(caller, fmt::format("{} inputs and {} outputs in one group", inputs, outputs));
  }
}

}  // namespace

Memory::Memory(std::shared_ptr<comm::MemoryBlock> block) noexcept : block_(std::move(block)) {}
void* Memory::data() const noexcept { return block_ ? block_->data : nullptr; }
std::size_t Memory::bytes() const noexcept { return block_ ? block_->bytes : 0; }

Communicator::Communicator(std::shared_ptr<comm::CommunicatorImpl> impl)
    : impl_(impl ? std::make_shared<comm::DeviceCommunicator>(std::move(impl)) : nullptr) {}

int Communicator::rank() const noexcept { return impl_ ? impl_->host().placement().rank : -1; }
int Communicator::size() const noexcept { return impl_ ? impl_->host().placement().size : 0; }
int Communicator::local_rank() const noexcept { return impl_ ? impl_->host().placement().local_rank : -1; }
int Communicator::local_size() const noexcept { return impl_ ? impl_->host().placement().local_size : 0; }
int Communicator::cross_rank() const noexcept { return impl_ ? impl_->host().placement().cross_rank : -1; }
int Communicator::cross_size() const noexcept { return impl_ ? impl_->host().placement().cross_size : 0; }
const std::string& Communicator::host() const noexcept {
  static const std::string none;
  return impl_ ? impl_->host().placement().host : none;
}
std::vector<int> Communicator::hosts() const {
  std::vector<int> all = impl_ ? impl_->host().hosts() : std::vector<int>();
  all.resize(static_cast<std::size_t>(size()), 0);
  return all;
}
std::chrono::milliseconds Communicator::timeout() const noexcept {
  return impl_ ? impl_->host().timeout() : std::chrono::milliseconds(0);
}

Work Communicator::all_reduce(Buffer data, const AllReduceOptions& options) { return all_reduce(data, data, options); }

Work Communicator::all_reduce(ConstBuffer input, Buffer output, const AllReduceOptions& options) {
  auto& impl = need(impl_);
  const Request request = all_reduce_request({impl.host(), Kind::AllReduce}, input, output, options);
  Work work = impl.start(request);
  if (request.finite_check) work.finite_checks_.push_back(request.finite_check);
  return work;
}

Work Communicator::all_reduce(std::span<const Buffer> data, const AllReduceOptions& options) {
  auto& impl = need(impl_);
  if (options.residual != nullptr)
    comm::refuse_argument({impl.host(), Kind::AllReduce}, "a residual is of one sum, not of a group");
  std::vector<Request> requests;
  for (const Buffer& one : data) {
    requests.push_back(all_reduce_request({impl.host(), Kind::AllReduce}, one, one, options));
  }
  std::vector<std::shared_ptr<const comm::FiniteCheck>> findings;
  if (options.check_finite) {
    for (const Request& request : requests) findings.push_back(request.finite_check);
  }
  Work work = impl.start_group(std::move(requests));
  work.finite_checks_ = std::move(findings);
  return work;
}

Work Communicator::reduce(Buffer data, const ReduceOptions& options) { return reduce(data, data, options); }

Work Communicator::reduce(ConstBuffer input, Buffer output, const ReduceOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::Reduce};
  comm::check_buffer(caller, "the input", input);
  comm::check_root(caller, options.root);
  if (rank() != options.root) {
    output = Buffer(nullptr, 0, input.dtype);
  } else {
    comm::check_buffer(caller, "the output", output);
    comm::check_same_type(caller, input, output);
    if (input.count != output.count) {
      comm::refuse_argument(caller,
                            fmt::format("the input has {} elements and the output {}", input.count, output.count));
    }
    comm::check_apart(caller, input, output, output.data);
  }
  Request request = make_request(caller, input, output, options);
  set_reduction(caller, request, options);
  set_weight(caller, request, options);
  request.root = options.root;
  return impl.start(request);
}

Work Communicator::reduce_scatter(ConstBuffer input, Buffer output, const ReduceScatterOptions& options) {
  auto& impl = need(impl_);
  return impl.start(reduce_scatter_request({impl.host(), Kind::ReduceScatter}, input, output, options));
}

Work Communicator::reduce_scatter(std::span<const ConstBuffer> inputs, std::span<const Buffer> outputs,
                                  const ReduceScatterOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::ReduceScatter};
  if (options.residual != nullptr) comm::refuse_argument(caller, "a residual is of one sum, not of a group");
  check_same_length(caller, inputs.size(), outputs.size());
  std::vector<Request> requests;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    requests.push_back(reduce_scatter_request(caller, inputs[i], outputs[i], options));
  }
  return impl.start_group(std::move(requests));
}

Work Communicator::reduce_scatter_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                                    const ReduceScatterOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::ReduceScatterV};
  check_buffers(caller, input, output);
  comm::check_counts(caller, "the counts", counts, "the input", input.count);
  comm::check_own_count(caller, counts, "the output", output.count);
  const void* const own = at(input.data, offset_of(counts, rank(), input.dtype));
  comm::check_apart(caller, input, output, output.data == own ? input.data : nullptr);
  Request request = make_request(caller, input, output, options);
  set_reduction(caller, request, options);
  set_weight(caller, request, options);
  set_wire_format(caller, request, options);
  request.counts = keep(counts);
  return impl.start(request);
}

Work Communicator::broadcast(Buffer data, const BroadcastOptions& options) {
  auto& impl = need(impl_);
  return impl.start(broadcast_request({impl.host(), Kind::Broadcast}, data, options));
}

Work Communicator::broadcast(std::span<const Buffer> data, const BroadcastOptions& options) {
  auto& impl = need(impl_);
  std::vector<Request> requests;
  for (const Buffer& one : data) requests.push_back(broadcast_request({impl.host(), Kind::Broadcast}, one, options));
  return impl.start_group(std::move(requests));
}

Work Communicator::all_gather(ConstBuffer input, Buffer output, const AllGatherOptions& options) {
  auto& impl = need(impl_);
  return impl.start(all_gather_request({impl.host(), Kind::AllGather}, input, output, options));
}

Work Communicator::all_gather(std::span<const ConstBuffer> inputs, std::span<const Buffer> outputs,
                              const AllGatherOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::AllGather};
  check_same_length(caller, inputs.size(), outputs.size());
  std::vector<Request> requests;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    requests.push_back(all_gather_request(caller, inputs[i], outputs[i], options));
  }
  return impl.start_group(std::move(requests));
}

Work Communicator::all_gather_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                                const AllGatherOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::AllGatherV};
  check_buffers(caller, input, output);
  comm::check_counts(caller, "the counts", counts, "the output", output.count);
  comm::check_own_count(caller, counts, "the input", input.count);
  comm::check_apart(caller, input, output, at(output.data, offset_of(counts, rank(), output.dtype)));
  Request request = make_request(caller, input, output, options);
  request.counts = keep(counts);
  return impl.start(request);
}

Work Communicator::gather(ConstBuffer input, Buffer output, const GatherOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::Gather};
  comm::check_buffer(caller, "the input", input);
  comm::check_root(caller, options.root);
  if (rank() == options.root) {
    check_buffers(caller, input, output);
    comm::check_parts(caller, "the output", output.count, "the input", input.count);
    comm::check_apart(caller, input, output, at(output.data, static_cast<std::size_t>(rank()) * input.bytes()));
  }
  return impl.start(gather_request(caller, input, output, options));
}

Work Communicator::gather_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                            const GatherOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::GatherV};
  comm::check_buffer(caller, "the input", input);
  comm::check_root(caller, options.root);
  comm::check_counts(caller, "the counts", counts);
  comm::check_own_count(caller, counts, "the input", input.count);
  if (rank() == options.root) {
    check_buffers(caller, input, output);
    comm::check_counts(caller, "the counts", counts, "the output", output.count);
    comm::check_apart(caller, input, output, at(output.data, offset_of(counts, rank(), output.dtype)));
  }
  Request request = gather_request(caller, input, output, options);
  request.counts = keep(counts);
  return impl.start(request);
}

Work Communicator::scatter(ConstBuffer input, Buffer output, const ScatterOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::Scatter};
  comm::check_buffer(caller, "the output", output);
  comm::check_root(caller, options.root);
  if (rank() == options.root) {
    check_buffers(caller, input, output);
    comm::check_parts(caller, "the input", input.count, "the output", output.count);
    const void* const own = at(input.data, static_cast<std::size_t>(rank()) * output.bytes());
    comm::check_apart(caller, input, output, output.data == own ? input.data : nullptr);
  }
  return impl.start(scatter_request(caller, input, output, options));
}

Work Communicator::scatter_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                             const ScatterOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::ScatterV};
  comm::check_buffer(caller, "the output", output);
  comm::check_root(caller, options.root);
  comm::check_counts(caller, "the counts", counts);
  comm::check_own_count(caller, counts, "the output", output.count);
  if (rank() == options.root) {
    check_buffers(caller, input, output);
    comm::check_counts(caller, "the counts", counts, "the input", input.count);
    const void* const own = at(input.data, offset_of(counts, rank(), input.dtype));
    comm::check_apart(caller, input, output, output.data == own ? input.data : nullptr);
  }
  Request request = scatter_request(caller, input, output, options);
  request.counts = keep(counts);
  return impl.start(request);
}

Work Communicator::all_to_all(ConstBuffer input, Buffer output, const AllToAllOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::AllToAll};
  check_buffers(caller, input, output);
  if (input.count != output.count || input.count % size() != 0) {
    comm::refuse_argument(caller, fmt::format("the input has {} elements and the output {}, which is not {} equal "
                                              "parts each",
                                              input.count, output.count, size()));
  }
  comm::check_apart(caller, input, output, nullptr);
  return impl.start(make_request(caller, input, output, options));
}

Work Communicator::all_to_all_v(ConstBuffer input, std::span<const std::int64_t> input_counts, Buffer output,
                                std::span<const std::int64_t> output_counts, const AllToAllOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::AllToAllV};
  check_buffers(caller, input, output);
  comm::check_counts(caller, "the input counts", input_counts, "the input", input.count);
  comm::check_counts(caller, "the output counts", output_counts, "the output", output.count);
  const auto own = static_cast<std::size_t>(rank());
  if (input_counts[own] != output_counts[own]) {
    comm::refuse_argument(caller, fmt::format("this rank sends itself {} elements and expects {} from itself",
                                              input_counts[own], output_counts[own]));
  }
  comm::check_apart(caller, input, output, nullptr);
  Request request = make_request(caller, input, output, options);
  request.counts = keep(input_counts, output_counts);
  return impl.start(request);
}

Work Communicator::barrier(const BarrierOptions& options) {
  auto& impl = need(impl_);
  return impl.start(make_request({impl.host(), Kind::Barrier}, {}, {}, options));
}

Work Communicator::send(ConstBuffer data, int peer, const SendOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::Send};
  comm::check_buffer(caller, "the buffer", data);
  comm::check_peer(caller, peer, options.tag);
  Request request = make_request(caller, data, Buffer(nullptr, 0, data.dtype), options);
  request.root = peer;
  request.tag = static_cast<std::int32_t>(options.tag);
  return impl.start(request);
}

Work Communicator::recv(Buffer data, int peer, const RecvOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::Recv};
  comm::check_buffer(caller, "the buffer", data);
  if (peer == kAnySource) {
    comm::check_any_source(caller, options.tag);
  } else {
    comm::check_peer(caller, peer, options.tag);
  }
  Request request = make_request(caller, ConstBuffer(nullptr, 0, data.dtype), data, options);
  request.root = peer;
  request.tag = static_cast<std::int32_t>(options.tag);
  return impl.start(request);
}

Communicator Communicator::split(const SplitOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::Split};
  comm::check_timeout(caller, options.timeout);
  if (options.color < kNoColor) {
    comm::refuse_argument(caller, fmt::format("the color is {}; colors are from 0, and kNoColor", options.color));
  }
  return Communicator(impl.host().split(options));
}

Communicator Communicator::split_by_host(const GroupOptions& options) {
  need(impl_);
  return split({.color = hosts()[static_cast<std::size_t>(rank())],
                .timeout = options.timeout,
                .background = options.background});
}

Communicator Communicator::group(std::span<const int> ranks, const GroupOptions& options) {
  auto& impl = need(impl_);
  const Caller caller{impl.host(), Kind::Split};
  comm::check_timeout(caller, options.timeout);
  comm::check_ranks(caller, ranks);
  return Communicator(impl.host().group(ranks, options));
}

Memory Communicator::allocate(std::size_t bytes, Device device) { return Memory(need(impl_).allocate(bytes, device)); }

Memory Communicator::allocate_shared(std::size_t bytes) { return Memory(need(impl_).host().allocate_shared(bytes)); }

int Communicator::join(const BarrierOptions& options) {
  auto& impl = need(impl_);
  comm::check_timeout({impl.host(), Kind::Joined}, options.timeout);
  return impl.join(options);
}

void Communicator::abort(std::string_view reason) { need(impl_).host().abort(reason); }

void Communicator::set_observer(Observer* observer) noexcept {
  if (impl_) impl_->host().set_observer(observer);
}

}  // namespace cohort
