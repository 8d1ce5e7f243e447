#include "base/hardware.h"
#include "base/result.h"
#include "comm/api/communicator_impl.h"
#include "comm/hosts/hosts_communicator.h"
#include "comm/hosts/world.h"
#include "comm/shm/local_communicator.h"
#include "net/store.h"
#include "rendezvous/identity.h"

#include <cohort/init.h>

#include <fmt/ranges.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <future>
#include <mutex>
#include <span>
#include <string>
#include <thread>

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

// This needs the local backend, since the ranks of each host form a world on it.
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

namespace cohort {
namespace {

std::chrono::milliseconds timeout_of(const ThreadWorldOptions& options) {
  if (options.timeout.count() != 0) return options.timeout;
  return options.across ? options.across.timeout() : std::chrono::minutes(30);
}

// Each rank waits for the others, so each one forms its communicator on a thread of its own.
std::vector<Communicator> form_each(int size, const std::function<Communicator(int)>& form_rank) {
  std::vector<Communicator> world(static_cast<std::size_t>(size));
  std::exception_ptr failed;
  std::mutex mutex;
  const auto form = [&](int number) {
    try {
      world[static_cast<std::size_t>(number)] = form_rank(number);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failed) failed = std::current_exception();
    }
  };
  std::vector<std::jthread> threads;
  for (int number = 1; number < size; ++number) threads.emplace_back(form, number);
  form(0);
  threads.clear();
  if (failed) std::rethrow_exception(failed);
  return world;
}

/// Throws on all processes if their numbers of threads differ, or if any of them has no secret for meeting other hosts.
void require_alike(int threads, Communicator& across) {
  const RendezvousMethod way = rendezvous_method(across.rank(), across.size());
  const bool cannot_meet =
      across.cross_size() > 1 && way != RendezvousMethod::Secret && way != RendezvousMethod::Launcher;
  const std::int64_t mine[] = {threads, cannot_meet ? 1 : 0};
  std::vector<std::int64_t> all(2 * static_cast<std::size_t>(across.size()));
  across.all_gather(std::span(mine), std::span(all)).wait();
  std::vector<std::int64_t> counts;
  bool meet = true;
  for (std::size_t i = 0; i < all.size(); i += 2) {
    counts.push_back(all[i]);
    meet = meet && all[i + 1] == 0;
  }
  if (std::count(counts.begin(), counts.end(), counts[0]) != across.size()) {
    raise(ErrorCode::Mismatch, "run_on_threads: the processes give [{}] threads, by rank -- give the same number",
          fmt::join(counts, ", "));
  }
  if (!meet) {
    raise(ErrorCode::Unavailable,
          "run_on_threads: the processes of `across` are on several hosts and have no secret -- start them by `cohort "
          "run`, srun or mpirun, or give them COHORT_SECRET_FILE");
  }
}

/// The ranks learn where to meet through the world of their processes. The secret is not sent through that world: it is
/// the job's secret, or the one that the processes got when they met through their launcher.
std::vector<Communicator> form_across(int threads, Communicator across, std::chrono::milliseconds timeout) {
  require_alike(threads, across);
  if (threads < 1) raise(ErrorCode::InvalidArgument, "form_thread_world: a world of {} ranks", threads);
  std::once_flag once;
  std::promise<std::string> telling;
  const std::shared_future<std::string> told = telling.get_future();
  InitOptions options;
  options.share = [&](const std::string&, const std::optional<std::string>& mine, std::chrono::milliseconds patience) {
    // In each process one thread broadcasts: rank 0's own thread in its process, elsewhere the first thread that asks.
    if (mine || across.rank() != 0) {
      std::call_once(once, [&] {
        try {
          std::vector<std::uint8_t> text(4000);  // the longest text that ShareFunction allows
          if (mine) std::copy(mine->begin(), mine->end(), text.begin());
          across.broadcast(std::span(text), {.timeout = patience}).wait();
          telling.set_value({text.begin(), std::find(text.begin(), text.end(), 0)});
        } catch (...) {
          telling.set_exception(std::current_exception());
        }
      });
    }
    if (told.wait_for(patience) != std::future_status::ready)
      raise(ErrorCode::Timeout, "run_on_threads: rank 0 did not say where to meet");
    return told.get();
  };
  options.share_name = "the world of the processes";
  options.group_name = "threads";
  options.program = "threads";  // the processes have compared their programs already
  options.world_size = across.size() * threads;
  options.timeout = timeout;
  return form_each(threads, [&](int number) {
    InitOptions own = options;
    own.rank = across.rank() * threads + number;
    return init(own);
  });
}

}  // namespace

std::vector<Communicator> form_thread_world(int size, const ThreadWorldOptions& options) {
  if (options.across && options.across.size() > 1) return form_across(size, options.across, timeout_of(options));
  std::vector<int> hosts = size < 1 ? std::vector<int>() : rendezvous::fake_hosts(size);
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
  form.timeout = timeout_of(options);
  form.placement.size = size;
  form.placement.local_size = size;
  form.placement.host = sys::host_name();
  form.placement.source = "threads of one process";
  form.hosts = std::move(hosts);
  form.one_machine = true;

  return form_each(size, [&](int rank) {
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
    return Communicator(backend.create(own));
  });
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
