// For tests: servers in this process at Unix names of their own, and workers that are threads.
#pragma once

#include <cohort/error.h>
#include <cohort/ps.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace cohort::ps::testing {

inline std::string unused_name() {
  static std::atomic<int> count{0};
  return "@cohort-ps-test-" + std::to_string(::getpid()) + "-" + std::to_string(++count);
}

class Servers {
 public:
  explicit Servers(std::size_t count, ServerOptions options = {}) {
    for (std::size_t i = 0; i < count; ++i) {
      options.endpoint = unused_name();
      names_.push_back(options.endpoint);
      servers_.push_back(std::make_unique<Server>(options));
    }
  }
  const std::vector<std::string>& names() const noexcept { return names_; }
  Server& operator[](std::size_t i) { return *servers_[i]; }
  void end(std::size_t i) { servers_[i].reset(); }
  void start(std::size_t i, ServerOptions options) {
    options.endpoint = names_[i];
    servers_[i] = std::make_unique<Server>(options);
  }

  ClientOptions options(int worker = 0, int workers = 1) const {
    ClientOptions options;
    options.servers = names_;
    options.worker = worker;
    options.workers = workers;
    options.connect_timeout = options.timeout = std::chrono::seconds(30);
    return options;
  }
  Client client(int worker = 0, int workers = 1) const { return Client::connect(options(worker, workers)); }

 private:
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Server>> servers_;
};

/// Runs `body(worker)` on as many threads; the first error is the test's.
inline void run_workers(int workers, const std::function<void(int)>& body) {
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int worker = 0; worker < workers; ++worker) {
    threads.emplace_back([&, worker] {
      try {
        body(worker);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

/// The error that `body` throws.
inline Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorCode::Internal, "");
}

inline bool contains(const Error& error, const std::string& text) {
  const bool found = std::string(error.what()).find(text) != std::string::npos;
  if (!found) ADD_FAILURE() << "\"" << text << "\" is not in: " << error.what();
  return found;
}

}  // namespace cohort::ps::testing
