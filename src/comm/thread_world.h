// Worlds whose ranks are threads, on a backend that the caller names. Any thread.
#pragma once

#include "comm/communicator_impl.h"

#include <cohort/communicator.h>

#include <functional>
#include <vector>

namespace cohort::comm {

/// `hosts` as in FormOptions. As `form_thread_world` otherwise.
std::vector<Communicator> form_on_threads(const Backend& backend, std::vector<int> hosts, int size,
                                          const ThreadWorldOptions& options);
/// As `run_on_threads`, over a world that has been formed.
void run_on_threads_of(std::vector<Communicator> world, const std::function<void(Communicator)>& body);

}  // namespace cohort::comm
