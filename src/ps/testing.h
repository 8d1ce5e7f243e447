// For tests: servers in this process, and workers that are threads. How they are connected says COHORT_TEST_PS_LINK, so
// that the same tests run over each kind of link: "shared" (a Unix name and shared memory, the default), "unix" (its
// socket alone), "tcp" (encrypted), or "near" (TCP, and shared memory since both are on one host).
#pragma once

#include "net/secret.h"

#include <cohort/error.h>
#include <cohort/ps.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <filesystem>
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
  explicit Servers(std::size_t count, const ServerOptions& options = {}) {
    for (std::size_t i = 0; i < count; ++i) {
      names_.push_back(over_tcp() ? "127.0.0.1:0" : unused_name());
      servers_.emplace_back();
      start(i, options);
      names_[i] = servers_[i]->endpoint();
    }
  }
  const std::vector<std::string>& names() const noexcept { return names_; }
  Server& operator[](std::size_t i) { return *servers_[i]; }
  void end(std::size_t i) { servers_[i].reset(); }
  void start(std::size_t i, ServerOptions options) {
    options.endpoint = names_[i];
    options.shared_memory = link() == "shared" || link() == "near";
    options.secret_file = secret_file();
    servers_[i] = std::make_unique<Server>(options);
  }

  ClientOptions options(int worker = 0, int workers = 1) const {
    ClientOptions options;
    options.servers = names_;
    options.secret_file = secret_file();
    options.worker = worker;
    options.workers = workers;
    options.connect_timeout = options.timeout = std::chrono::seconds(30);
    return options;
  }
  Client client(int worker = 0, int workers = 1) const { return Client::connect(options(worker, workers)); }

 private:
  static std::string link() {
    const char* const given = std::getenv("COHORT_TEST_PS_LINK");
    return given == nullptr ? "shared" : given;
  }
  static bool over_tcp() { return link() == "tcp" || link() == "near"; }
  /// One for all of this process.
  static std::string secret_file() {
    struct File {
      std::string path = std::filesystem::temp_directory_path() / ("cohort-ps-test-" + std::to_string(::getpid()));
      File() { value_or_throw(net::write_new_secret_file(path)); }
      ~File() { std::filesystem::remove(path); }
    };
    if (!over_tcp()) return {};
    static const File file;
    return file.path;
  }

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
