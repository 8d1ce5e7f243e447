// For tests: a factory of worlds, by its name. A name is a backend's (backends.cpp), and behind a colon on how many
// hosts the ranks are, or how many are on each ("local", "hosts:2", "hosts:2,1"). The tests of this process run over
// the one that COHORT_TEST_WORLD names, or else over "local": so a new backend is tested by naming it. Any thread.
#pragma once

#include "base/result.h"
#include "cluster/identity.h"
#include "comm/thread_world.h"

#include <cstdlib>
#include <functional>
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

  /// By rank, the number of its host; empty if all are on one.
  std::vector<int> hosts(int size) const {
    std::vector<int> all = value_or_throw(cluster::divide_into_hosts(hosts_, size));
    if (!all.empty() && all.back() == 0) all.clear();
    return all;
  }
  /// Of a world of so many ranks: with few of them, what is to be on several hosts is on one.
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

}  // namespace cohort::comm::testing
