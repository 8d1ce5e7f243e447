#include "comm/control/fusion.h"

#include <cstring>
#include <memory>
#include <utility>

namespace cohort::comm {
namespace {

// Larger buffers gain nothing from being copied together.
constexpr std::size_t kFusedBuffer = std::size_t{64} << 10;

bool fusible(const Request& request) noexcept {
  return (request.kind == Kind::AllReduce || request.kind == Kind::Broadcast) && request.input == request.output &&
         request.input_bytes() <= kFusedBuffer && !request.pieces;
}

bool alike(const Request& a, const Request& b) noexcept {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.root == b.root && a.weighted == b.weighted &&
         a.bf16_wire == b.bf16_wire && a.weight == b.weight && a.prescale == b.prescale && a.postscale == b.postscale;
}

}  // namespace

std::size_t fusible_run(std::span<const Request> requests) noexcept {
  if (!fusible(requests.front())) return 1;
  std::size_t count = 1;
  std::size_t bytes = requests.front().input_bytes();
  while (count < requests.size() && fusible(requests[count]) && alike(requests.front(), requests[count]) &&
         bytes + requests[count].input_bytes() <= kFusedTotal) {
    bytes += requests[count++].input_bytes();
  }
  return count;
}

Request fuse(std::span<const Request> requests, std::byte* buffer) {
  Request together = requests.front();
  together.finite_check = nullptr;  // each looks at its own result, which is small
  together.input = together.output = buffer;
  together.input_count = 0;
  Counts counts;
  for (const Request& request : requests) {
    counts.input.push_back(request.input_count);
    together.input_count += request.input_count;
    if (request.input_count > 0) std::memcpy(buffer, request.input, request.input_bytes());
    buffer += request.input_bytes();
  }
  together.output_count = together.input_count;
  together.counts = std::make_shared<const Counts>(std::move(counts));
  return together;
}

void unfuse(std::span<const Request> requests, const std::byte* buffer) {
  for (const Request& request : requests) {
    if (request.input_count > 0) std::memcpy(request.output, buffer, request.input_bytes());
    buffer += request.input_bytes();
  }
}

}  // namespace cohort::comm
