// What a client and its tables share: the ways to the servers, the clock, a table's numbers there. Private to the
// client's own files (client*.cpp, requests.*). It lives as long as the client, any table or any request of it; its
// thread keeps connections alive meanwhile. Any thread; a table's sum under its mutex.
// One call on a table as messages: its keys without duplicates, by server, in messages of bounded size; and the answers
// that a Work waits for. Private to the client's own files. One thread at a time.
#pragma once

#include "ps/key_map.h"
#include "ps/link.h"
#include "ps/server_map.h"

#include <cohort/ps.h>

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::ps {

struct Client::Impl {
  ClientOptions options;
  Placement placement;
  std::deque<Link> links;
  std::atomic<std::int64_t> clock{0};
  std::uint64_t barrier = 0;
  std::atomic<bool> left{false};

  /// In Mode::Sync a clock has one step of each row, so all pushes of this worker to the table say the same learning
  /// rate.
  void demand_one_rate(const Table::Impl& table, std::optional<double> lr);
  std::mutex rates_mutex;
  std::map<std::uint32_t, std::pair<std::int64_t, double>> rates;  // by table: of the clock in which it was pushed last

  // With backup workers. A clock ends first at the first server, then at the others: pushes wait for that, so that all
  // servers take them for the same clock's.
  std::shared_mutex ending;
  std::atomic<bool> has_backup_workers{false};
  bool proposed = false;  // under the mutex: the first server knows that the clock has ended, and the others do not
  std::atomic<std::int64_t> late{0};

  void begin_with_backup_workers();
  std::int64_t end_clock_with_backup_workers();
  Concluded await(std::int64_t clock_ended);
  void conclude(std::size_t first_link, std::int64_t next, const Quorum& quorum);

  // Connections that break while nobody asks anything are made again, since servers take who is not connected for lost.
  std::mutex mutex;
  std::condition_variable stopping;
  bool stopped = false;
  std::thread keeper;
  pid_t process = ::getpid();

  ~Impl();
  void keep();
  /// Throws InvalidArgument once it has left: servers take it for gone, and what they answered would be of that.
  void demand_here(const char* what) const;
  /// Servers end when all workers have left: connections that they close then are not to be made again.
  void stop_keeping();
};

struct Table::Impl {
  std::shared_ptr<Client::Impl> client;
  std::string name;
  TableOptions options;
  std::int64_t elements = 0;
  std::vector<std::uint32_t> numbers;  // the table's, on each server
  std::mutex mutex;
  KeyedSum sum;  // under the mutex

  std::size_t dim() const noexcept { return static_cast<std::size_t>(options.dim); }
  std::uint32_t server_of(std::uint64_t key) const noexcept {
    return client->placement.server_of_row(key, elements, options.dim);
  }
};

/// Some of the keys of a call: those of one server, in one message.
struct Part {
  std::uint32_t server;
  std::vector<std::uint32_t> places;  // of unique keys
};

struct Work::State {
  struct Sent {
    Link* link;
    Link::RequestPtr request;
    std::vector<std::uint32_t> places = {};  // of the rows that it reads, among the unique keys
    bool reads = false;
  };

  std::shared_ptr<Client::Impl> client;
  std::int64_t clock = 0;
  std::vector<Sent> sent = {};
  std::vector<std::uint32_t> unique_of = {};  // of each input; of a variable's pieces none: each is its own
  std::vector<std::uint32_t> first_of = {};   // input of each unique key
  std::span<float> rows = {};                 // of a variable: the last may not be whole
  std::size_t dim = 0;
  bool finished = false;
  Pulled pulled = {};
  std::optional<Error> failed = {};

  void finish();
  void take_rows(const Sent& one, std::string_view payload) const;
};

/// Requests of one call on a table.
class Requests {
 public:
  explicit Requests(Table::Impl& table);

  void pull(std::span<const std::uint64_t> keys, std::span<float> rows);
  /// Duplicates are added.
  void push(std::span<const std::uint64_t> keys, std::span<const float> gradients, std::optional<double> lr);
  /// Of duplicates the last one.
  void assign(std::span<const std::uint64_t> keys, std::span<const float> rows);
  void erase(std::span<const std::uint64_t> keys);

  // Of a variable, whose keys are its pieces: values go from the caller's memory, and there, without a copy between.
  void pull_pieces(std::span<float> values);
  void push_pieces(std::span<const float> gradients, std::optional<double> lr);
  void assign_pieces(std::span<const float> values);

  Work take() { return Work(std::move(state_)); }

 private:
  void demand_rows(const char* what, std::size_t keys, std::size_t floats) const;
  /// What `rows` of the unique keys are: "push", "gradient".
  void demand_finite(const char* what, const char* noun, const std::vector<std::uint64_t>& unique,
                     std::span<const float> rows) const;
  std::vector<std::uint64_t> pieces(std::size_t floats) const;
  void ask(const std::vector<std::uint64_t>& unique);
  std::vector<Part> parts(const std::vector<std::uint64_t>& unique, std::size_t bytes) const;
  /// Rows that are not whole end in zeros.
  void change(Method method, const std::vector<std::uint64_t>& unique, std::span<const float> rows,
              std::optional<double> lr);

  Table::Impl& table_;
  std::unique_ptr<Work::State> state_;
};

}  // namespace cohort::ps
