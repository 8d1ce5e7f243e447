// For tests: servers in this process, and workers that are threads. COHORT_TEST_PS_LINK selects how they are connected,
// so that the same tests run over each kind of link: "shared" (a Unix name and shared memory, the default), "unix" (its
// socket alone), "tcp" (encrypted), or "near" (TCP, and shared memory since both are on one host).
#pragma once

#include "ps/tests/testing_counters.h"

#include "net/secret.h"
#include "ps/key_map.h"
#include "ps/sparse_table.h"

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
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
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
  /// Returns one file for the whole process.
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

/// Runs `body(worker)` on `workers` threads, and throws the first error.
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

using Keys = std::vector<std::uint64_t>;
using Floats = std::vector<float>;

inline Floats pull(Table& table, const Keys& keys) {
  Floats rows(keys.size() * static_cast<std::size_t>(table.options().dim));
  table.pull(keys, rows).wait();
  return rows;
}

/// Reference result in one process: adds a clock's gradients by ascending worker, then does one step.
struct OneProcess {
  explicit OneProcess(const TableOptions& options) : table("t", options) {}
  SparseTable table;
  KeyedSum sum;

  void clock(const std::vector<std::pair<Keys, Floats>>& of_workers) {
    const std::size_t dim = table.dim();
    sum.begin(dim);
    for (const auto& [keys, gradients] : of_workers) {
      KeyedSum own;
      own.begin(dim);
      for (std::size_t i = 0; i < keys.size(); ++i) own.add(keys[i], gradients.data() + i * dim);
      for (std::size_t i = 0; i < own.size(); ++i) sum.add(own.keys()[i], own.sum(i));
    }
    table.step({sum.keys().data(), sum.sums(), sum.size()}, 1);
  }
};

/// Random gradients of a worker's clock: the keys overlap with other workers', and repeat.
inline std::pair<Keys, Floats> batch(int worker, std::int64_t clock, std::int64_t dim) {
  std::mt19937 random(static_cast<unsigned>(worker * 1000 + clock));
  std::normal_distribution<float> normal;
  Keys keys(60);
  for (std::uint64_t& key : keys) key = random() % 40;
  Floats gradients(keys.size() * static_cast<std::size_t>(dim));
  for (float& one : gradients) one = normal(random);
  return {keys, gradients};
}

class Folder {
 public:
  Folder() {
    std::string name = std::filesystem::temp_directory_path() / "cohort-ps-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp");
    path_ = name;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const noexcept { return path_; }

 private:
  std::string path_;
};

}  // namespace cohort::ps::testing
