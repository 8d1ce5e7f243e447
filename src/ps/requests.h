// One call on a table as messages: its keys without duplicates, by server, in messages of bounded size; and the answers
// that a Work waits for. Private to the client's own files. One thread at a time.
#pragma once

#include "ps/client_impl.h"

#include <cohort/ps.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace cohort::ps {

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
