#include "base/result.h"
#include "comm/communicator_impl.h"
#include "comm/hosts/hosts_communicator.h"
#include "comm/local/local_communicator.h"

#include <sys/mman.h>
#include <unistd.h>

#include <iterator>

namespace cohort::comm {
namespace {

constexpr DType kAllDTypes[] = {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16,  DType::Int8,
                                DType::Int16,   DType::Int32,   DType::Int64,   DType::UInt8,     DType::UInt16,
                                DType::UInt32,  DType::UInt64,  DType::Bool,    DType::Complex64, DType::Complex128};
constexpr ReduceOp kAllOps[] = {ReduceOp::Sum,     ReduceOp::Average, ReduceOp::Min,   ReduceOp::Max,
                                ReduceOp::Product, ReduceOp::BitAnd,  ReduceOp::BitOr, ReduceOp::BitXor};
static_assert(std::size(kAllDTypes) == kDTypeCount && std::size(kAllOps) == kReduceOpCount);
constexpr DeviceType kHostMemory[] = {DeviceType::CPU};

Availability probe_local() {
  Availability result;
  const int fd = ::memfd_create("cohort-probe", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  result.available = fd >= 0;
  if (fd >= 0) {
    ::close(fd);
  } else {
    result.reason = "memfd_create: " + errno_text(errno) + " -- it needs Linux 3.17 and no filter against it";
  }
  result.version = "shared memory, 1";
  return result;
}

// The ranks of each host are a world of the local backend.
Availability probe_hosts() {
  Availability result = probe_local();
  result.version = "shared memory and TCP, 1";
  return result;
}

constexpr Backend kBackends[] = {
    {"local", probe_local,
     [] {
       return Capabilities{kAllDTypes, kAllOps, kHostMemory, false};
     },
     [](const FormOptions& options) -> std::shared_ptr<CommunicatorImpl> {
       return std::make_shared<local::LocalCommunicator>(options);
     }},
    {"hosts", probe_hosts,
     [] {
       return Capabilities{kAllDTypes, kAllOps, kHostMemory, true};
     },
     [](const FormOptions& options) -> std::shared_ptr<CommunicatorImpl> {
       return std::make_shared<hosts::HostsCommunicator>(options);
     }},
};

}  // namespace

std::span<const Backend> backends() noexcept { return kBackends; }

const Backend& usual_backend(bool several_hosts) noexcept { return kBackends[several_hosts ? 1 : 0]; }

}  // namespace cohort::comm
