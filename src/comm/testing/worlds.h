// For tests: a factory of worlds, by its name. A name is that of a backend (backends.cpp); behind a colon follows the
// number of hosts, or the number of ranks on each ("local", "hosts:2", "hosts:2,1"). The tests of this process use the
// world that COHORT_TEST_WORLD names, or else "local", so a new backend is tested by naming it. Any thread.
#pragma once

#include "base/result.h"
#include "comm/api/communicator_impl.h"
#include "rendezvous/identity.h"

#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/observer.h>

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::comm::testing {

class Worlds {
 public:
  explicit Worlds(std::string_view name)
      : backend_(name.substr(0, name.find(':'))),
        hosts_(name.find(':') == std::string_view::npos ? "" : name.substr(name.find(':') + 1)) {}
  static const Worlds& chosen() {
    static const Worlds worlds([] {
      const char* const name = std::getenv("COHORT_TEST_WORLD");
      return std::string_view(name != nullptr ? name : "local");
    }());
    return worlds;
  }

  /// Number of each rank's host; empty if all are on one.
  std::vector<int> hosts(int size) const {
    std::vector<int> all = value_or_throw(rendezvous::divide_into_hosts(hosts_, size));
    if (!all.empty() && all.back() == 0) all.clear();
    return all;
  }
  /// Backend for a world of `size` ranks. A world with too few ranks for several hosts is on one host.
  const Backend& backend(int size) const {
    for (const Backend& each : backends()) {
      if (each.name != backend_) continue;
      return each.several_hosts && hosts(size).empty() ? usual_backend(false) : each;
    }
    raise(ErrorCode::InvalidArgument, "COHORT_TEST_WORLD: there is no backend {}", backend_);
  }
  std::vector<Communicator> form(int size, const ThreadWorldOptions& options = {}) const {
    return form_on_threads(backend(size), hosts(size), size, options);
  }

 private:
  const std::string backend_;
  const std::string hosts_;
};

inline std::vector<Communicator> form_world(int size, const ThreadWorldOptions& options = {}) {
  return Worlds::chosen().form(size, options);
}
inline void run_world(int size, const std::function<void(Communicator)>& body, const ThreadWorldOptions& options = {}) {
  run_on_threads_of(form_world(size, options), body);
}

// For tests: the texts of operations' errors.

/// The text of the error with this code that `body` throws; fails the test if it throws no error or another one.
inline std::string what_of(const std::function<void()>& body, ErrorCode code) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

inline bool contains(const std::string& text, std::string_view part) { return text.find(part) != std::string::npos; }

// For tests: communicator memory as numbers.

inline std::span<float> floats(Memory& memory) {
  return {static_cast<float*>(memory.data()), memory.bytes() / sizeof(float)};
}

/// Records the events that an observer receives.
struct Recorder : Observer {
  void on_collective(const CollectiveEvent& event) override {
    const std::lock_guard lock(mutex);
    events.push_back(event);
  }
  std::mutex mutex;
  std::vector<CollectiveEvent> events;
};

}  // namespace cohort::comm::testing
