#include "comm/thread_world.h"

#include "base/result.h"
#include "cluster/pretended_hosts.h"
#include "comm/hosts/layout.h"
#include "store/store.h"
#include "sys/cpus.h"

#include <exception>
#include <mutex>
#include <string>
#include <thread>

namespace cohort {

std::vector<Communicator> form_thread_world(int size, const ThreadWorldOptions& options) {
  std::vector<int> hosts = size < 1 ? std::vector<int>() : cluster::pretended_hosts(size);
  if (!hosts.empty() && hosts.back() == 0) hosts.clear();
  const comm::Backend& backend = comm::usual_backend(!hosts.empty());
  return comm::form_on_threads(backend, std::move(hosts), size, options);
}

void run_on_threads(int size, const std::function<void(Communicator)>& body, const ThreadWorldOptions& options) {
  comm::run_on_threads_of(form_thread_world(size, options), body);
}

namespace comm {

std::vector<Communicator> form_on_threads(const Backend& backend, std::vector<int> hosts, int size,
                                          const ThreadWorldOptions& options) {
  if (size < 1) raise(ErrorCode::InvalidArgument, "form_thread_world: a world of {} ranks", size);
  FormOptions form;
  form.store = store::make_in_process_store();
  form.timeout = options.timeout;
  form.placement.size = size;
  form.placement.local_size = size;
  form.placement.host = sys::host_name();
  form.placement.source = "threads of one process";
  form.hosts = std::move(hosts);
  form.one_machine = true;

  // Each rank waits for the others to come, so each forms on a thread of its own.
  std::vector<Communicator> world(static_cast<std::size_t>(size));
  std::exception_ptr failed;
  std::mutex mutex;
  const auto form_rank = [&](int rank) {
    try {
      FormOptions own = form;
      own.placement.rank = rank;
      own.placement.local_rank = rank;
      if (!form.hosts.empty()) {
        const hosts::Layout layout(form.hosts, rank);
        own.placement.local_rank = layout.local;
        own.placement.local_size = layout.locals;
        own.placement.cross_rank = layout.host;
        own.placement.cross_size = layout.hosts;
        own.placement.host += fmt::format("#{}", layout.host);
      }
      world[static_cast<std::size_t>(rank)] = Communicator(backend.create(own));
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failed) failed = std::current_exception();
    }
  };
  std::vector<std::jthread> threads;
  for (int rank = 1; rank < size; ++rank) threads.emplace_back(form_rank, rank);
  form_rank(0);
  threads.clear();
  if (failed) std::rethrow_exception(failed);
  return world;
}

void run_on_threads_of(std::vector<Communicator> world, const std::function<void(Communicator)>& body) {
  std::exception_ptr first;
  std::mutex mutex;
  const auto run_rank = [&](Communicator& own) {
    std::string reason;
    try {
      body(own);
      return;
    } catch (const std::exception& error) {
      reason = error.what();
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    } catch (...) {
      reason = "an exception";
      const std::lock_guard lock(mutex);
      if (!first) first = std::current_exception();
    }
    own.abort(reason);
  };
  std::vector<std::jthread> threads;
  for (Communicator& own : world) {
    threads.emplace_back([&run_rank, own = std::move(own)]() mutable { run_rank(own); });
  }
  threads.clear();
  if (first) std::rethrow_exception(first);
}

}  // namespace comm
}  // namespace cohort
