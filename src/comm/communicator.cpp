#include <cohort/communicator.h>

#include "base/result.h"
#include "comm/communicator_impl.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

namespace cohort {
namespace {

constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

comm::CommunicatorImpl& need(const std::shared_ptr<comm::CommunicatorImpl>& impl) {
  if (!impl) {
    raise(ErrorCode::InvalidArgument, "this Communicator belongs to no world -- form one with cohort::join() first");
  }
  return *impl;
}

template <class... Args>
[[noreturn]] void refuse(const comm::CommunicatorImpl& impl, std::string_view operation,
                         fmt::format_string<Args...> format, Args&&... args) {
  ErrorContext context;
  context.rank = impl.placement().rank;
  context.host = impl.placement().host;
  context.operation = operation;
  context.cause = fmt::format(format, std::forward<Args>(args)...);
  const std::string message =
      fmt::format("{}: {} -- rank {} ({})", operation, context.cause, context.rank, context.host);
  throw Error(ErrorCode::InvalidArgument, message, std::move(context));
}

void check_buffer(const comm::CommunicatorImpl& impl, std::string_view operation, std::string_view name,
                  const ConstBuffer& buffer) {
  if (static_cast<int>(buffer.dtype) >= kDTypeCount) {
    refuse(impl, operation, "{} has the unknown dtype {}", name, static_cast<int>(buffer.dtype));
  }
  if (buffer.count < 0) refuse(impl, operation, "{} has a count of {}", name, buffer.count);
  if (buffer.count > std::numeric_limits<std::int64_t>::max() / 8) {
    refuse(impl, operation, "{} has {} elements, more than any memory", name, buffer.count);
  }
  if (buffer.data == nullptr && buffer.count > 0) {
    refuse(impl, operation, "{} is null, with a count of {}", name, buffer.count);
  }
  if (reinterpret_cast<std::uintptr_t>(buffer.data) % size_of(buffer.dtype) != 0) {
    refuse(impl, operation, "{} is not aligned to its elements of {} bytes", name, size_of(buffer.dtype));
  }
  if (buffer.device.type != DeviceType::CPU) refuse(impl, operation, "{} is on a device that is not supported", name);
}

void check_same_type(const comm::CommunicatorImpl& impl, std::string_view operation, const ConstBuffer& input,
                     const Buffer& output) {
  if (input.dtype != output.dtype) {
    refuse(impl, operation, "the input is {} and the output {}", to_string(input.dtype), to_string(output.dtype));
  }
}

/// `allowed`: where the input may begin (in place); anywhere else the two must not share a byte.
void check_overlap(const comm::CommunicatorImpl& impl, std::string_view operation, const ConstBuffer& input,
                   const Buffer& output, std::uintptr_t input_begin, std::uintptr_t allowed) {
  const auto output_begin = reinterpret_cast<std::uintptr_t>(output.data);
  if (input.count == 0 || output.count == 0 || input_begin == allowed) return;
  if (input_begin < output_begin + output.bytes() && output_begin < input_begin + input.bytes()) {
    refuse(impl, operation, "input and output overlap in part");
  }
}

void check_op(const comm::CommunicatorImpl& impl, std::string_view operation, ReduceOp op) {
  if (static_cast<int>(op) >= kReduceOpCount) {
    refuse(impl, operation, "unknown reduction {}", static_cast<int>(op));
  }
}

void check_timeout(const comm::CommunicatorImpl& impl, std::string_view operation,
                   std::optional<std::chrono::milliseconds> timeout) {
  if (!timeout) return;
  if (timeout->count() <= 0 || *timeout > kLongestTimeout) {
    refuse(impl, operation, "a timeout of {} ms has no meaning (from 1 ms to a year)", timeout->count());
  }
}

std::uintptr_t address(const void* data) noexcept { return reinterpret_cast<std::uintptr_t>(data); }

}  // namespace

Memory::Memory(std::shared_ptr<comm::MemoryBlock> block) noexcept : block_(std::move(block)) {}
void* Memory::data() const noexcept { return block_ ? block_->data : nullptr; }
std::size_t Memory::bytes() const noexcept { return block_ ? block_->bytes : 0; }

Communicator::Communicator(std::shared_ptr<comm::CommunicatorImpl> impl) noexcept : impl_(std::move(impl)) {}

int Communicator::rank() const noexcept { return impl_ ? impl_->placement().rank : -1; }
int Communicator::size() const noexcept { return impl_ ? impl_->placement().size : 0; }
int Communicator::local_rank() const noexcept { return impl_ ? impl_->placement().local_rank : -1; }
int Communicator::local_size() const noexcept { return impl_ ? impl_->placement().local_size : 0; }
int Communicator::cross_rank() const noexcept { return impl_ ? impl_->placement().cross_rank : -1; }
int Communicator::cross_size() const noexcept { return impl_ ? impl_->placement().cross_size : 0; }
const std::string& Communicator::host() const noexcept {
  static const std::string none;
  return impl_ ? impl_->placement().host : none;
}
std::chrono::milliseconds Communicator::timeout() const noexcept {
  return impl_ ? impl_->timeout() : std::chrono::milliseconds(0);
}

Work Communicator::all_reduce(Buffer data, const AllReduceOptions& options) { return all_reduce(data, data, options); }

Work Communicator::all_reduce(ConstBuffer input, Buffer output, const AllReduceOptions& options) {
  auto& impl = need(impl_);
  constexpr std::string_view kName = "all_reduce";
  check_buffer(impl, kName, "the input", input);
  check_buffer(impl, kName, "the output", output);
  check_same_type(impl, kName, input, output);
  check_op(impl, kName, options.op);
  check_timeout(impl, kName, options.timeout);
  if (input.count != output.count) {
    refuse(impl, kName, "the input has {} elements and the output {}", input.count, output.count);
  }
  check_overlap(impl, kName, input, output, address(input.data), address(output.data));
  if (options.weight) {
    if (options.op != ReduceOp::Average) {
      refuse(impl, kName, "a weight goes with ReduceOp::Average only, not with {}", to_string(options.op));
    }
    if (!is_floating(input.dtype)) {
      refuse(impl, kName, "a weighted average needs floating-point elements, not {}", to_string(input.dtype));
    }
    if (!std::isfinite(*options.weight) || *options.weight < 0) {
      refuse(impl, kName, "the weight is {}; it has to be finite and >= 0", *options.weight);
    }
  }
  return impl.all_reduce(input, output, options);
}

Work Communicator::reduce_scatter(ConstBuffer input, Buffer output, const ReduceScatterOptions& options) {
  auto& impl = need(impl_);
  constexpr std::string_view kName = "reduce_scatter";
  check_buffer(impl, kName, "the input", input);
  check_buffer(impl, kName, "the output", output);
  check_same_type(impl, kName, input, output);
  check_op(impl, kName, options.op);
  check_timeout(impl, kName, options.timeout);
  if (output.count > input.count || input.count / size() != output.count || input.count % size() != 0) {
    refuse(impl, kName, "the input has {} elements, which is not {} parts of the output's {}", input.count, size(),
           output.count);
  }
  // In place: the output is this rank's part of the input.
  const std::uintptr_t own_part = address(input.data) + static_cast<std::size_t>(rank()) * output.bytes();
  if (address(output.data) != own_part) {
    check_overlap(impl, kName, input, output, address(input.data), std::numeric_limits<std::uintptr_t>::max());
  }
  return impl.reduce_scatter(input, output, options);
}

Work Communicator::all_gather(ConstBuffer input, Buffer output, const AllGatherOptions& options) {
  auto& impl = need(impl_);
  constexpr std::string_view kName = "all_gather";
  check_buffer(impl, kName, "the input", input);
  check_buffer(impl, kName, "the output", output);
  check_same_type(impl, kName, input, output);
  check_timeout(impl, kName, options.timeout);
  if (input.count > output.count || output.count / size() != input.count || output.count % size() != 0) {
    refuse(impl, kName, "the output has {} elements, which is not {} parts of the input's {}", output.count, size(),
           input.count);
  }
  check_overlap(impl, kName, input, output, address(input.data),
                address(output.data) + static_cast<std::size_t>(rank()) * input.bytes());
  return impl.all_gather(input, output, options);
}

Work Communicator::broadcast(Buffer data, const BroadcastOptions& options) {
  auto& impl = need(impl_);
  constexpr std::string_view kName = "broadcast";
  check_buffer(impl, kName, "the buffer", data);
  check_timeout(impl, kName, options.timeout);
  if (options.root < 0 || options.root >= size()) {
    refuse(impl, kName, "the root is {} in a world of {}", options.root, size());
  }
  return impl.broadcast(data, options);
}

Work Communicator::barrier(const BarrierOptions& options) {
  auto& impl = need(impl_);
  check_timeout(impl, "barrier", options.timeout);
  return impl.barrier(options);
}

Memory Communicator::allocate(std::size_t bytes, Device device) {
  auto& impl = need(impl_);
  if (device.type != DeviceType::CPU) refuse(impl, "allocate", "the device is not supported");
  return Memory(impl.allocate(bytes, device));
}

int Communicator::join(const BarrierOptions& options) {
  auto& impl = need(impl_);
  check_timeout(impl, "join", options.timeout);
  return impl.join(options);
}

void Communicator::abort(std::string_view reason) { need(impl_).abort(reason); }

void Communicator::set_observer(Observer* observer) noexcept {
  if (impl_) impl_->set_observer(observer);
}

}  // namespace cohort
