#include "base/result.h"
#include "comm/communicator_impl.h"
#include "comm/hosts/hosts_communicator.h"
#include "comm/local/local_communicator.h"

#include <sys/mman.h>
#include <unistd.h>

namespace cohort::comm {
namespace {

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
    {"local", probe_local, false,
     [](const FormOptions& options) -> std::shared_ptr<CommunicatorImpl> {
       return std::make_shared<local::LocalCommunicator>(options);
     }},
    {"hosts", probe_hosts, true,
     [](const FormOptions& options) -> std::shared_ptr<CommunicatorImpl> {
       return std::make_shared<hosts::HostsCommunicator>(options);
     }},
};

}  // namespace

std::span<const Backend> backends() noexcept { return kBackends; }

const Backend& usual_backend(bool several_hosts) noexcept { return kBackends[several_hosts ? 1 : 0]; }

}  // namespace cohort::comm
