#include "ps/client_impl.h"

#include "base/log.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <variant>

namespace cohort::ps {
namespace {

// Bytes of one message. Several are under way at a time, and in shared memory each fills whole blocks
// (net/shared_calls.h). A server makes a change as a whole or not at all.
constexpr std::size_t kRead = std::size_t{250} << 10;
constexpr std::size_t kChange = std::size_t{1000} << 10;

/// Divides keys without duplicates by server, into messages of bounded size.
std::vector<Part> parts_of(const std::vector<std::uint64_t>& unique, std::size_t row_bytes, std::size_t bytes,
                           const std::function<std::uint32_t(std::uint64_t)>& server_of, std::size_t servers) {
  const std::size_t most = std::clamp<std::size_t>(bytes / (row_bytes + sizeof(std::uint64_t)), 1, kMostKeys);
  std::vector<Part> parts;
  std::vector<std::size_t> open(servers, ~std::size_t{0});
  for (std::uint32_t place = 0; place < unique.size(); ++place) {
    const std::uint32_t server = server_of(unique[place]);
    std::size_t& at = open[server];
    if (at == ~std::size_t{0} || parts[at].places.size() == most) {
      at = parts.size();
      parts.push_back({server, {}});
      parts.back().places.reserve(std::min(most, unique.size() / servers + 16));
    }
    parts[at].places.push_back(place);
  }
  return parts;
}

/// Returns the index of the first NaN or infinity; rows.size() if there is none. Checks many values together, which is
/// many times as fast.
std::size_t first_non_finite(std::span<const float> rows) {
  constexpr std::size_t kTogether = 1024;
  constexpr std::uint32_t kExponent = 0x7f800000;
  std::size_t at = 0;
  for (; at + kTogether <= rows.size(); at += kTogether) {
    std::uint32_t largest = 0;
    for (std::size_t i = 0; i < kTogether; ++i)
      largest = std::max(largest, std::bit_cast<std::uint32_t>(rows[at + i]) & kExponent);
    if (largest == kExponent) break;
  }
  while (at < rows.size() && std::isfinite(rows[at])) ++at;
  return at;
}

void append_keys(std::string& body, const Part& part, const std::vector<std::uint64_t>& unique) {
  const std::size_t at = body.size();
  body.resize(at + part.places.size() * sizeof(std::uint64_t));
  char* to = body.data() + at;
  for (const std::uint32_t place : part.places) {
    std::memcpy(to, &unique[place], sizeof(std::uint64_t));
    to += sizeof(std::uint64_t);
  }
}

}  // namespace

void Work::State::finish() {
  if (finished) return;
  finished = true;
  std::optional<std::int64_t> least;
  for (const Sent& one : sent) {
    try {
      const Heard answer = one.link->finish(one.request);
      if (!one.reads) continue;
      least = std::min(least.value_or(answer.answer.clock), answer.answer.clock);
      pulled.version += answer.answer.version;
      take_rows(one, answer.payload());
    } catch (const Error& error) {
      if (!failed) failed = error;
    }
  }
  if (failed) return;
  pulled.clock = least.value_or(clock);
  pulled.behind = std::max<std::int64_t>(0, clock - pulled.clock);
  if (first_of.size() < unique_of.size()) {  // there are duplicate keys
    for (std::size_t i = 0; i < unique_of.size(); ++i) {
      const std::size_t first = first_of[unique_of[i]];
      if (first != i) std::memcpy(rows.data() + i * dim, rows.data() + first * dim, dim * sizeof(float));
    }
  }
}

void Work::State::take_rows(const Sent& one, std::string_view payload) const {
  const std::size_t bytes = dim * sizeof(float);
  if (payload.size() != one.places.size() * bytes)
    raise(ErrorCode::Corrupt, "{} sent {} bytes for {} rows", one.link->name(), payload.size(), one.places.size());
  const char* from = payload.data();
  for (const std::uint32_t place : one.places) {
    const std::size_t at = (first_of.empty() ? place : first_of[place]) * dim;
    std::memcpy(rows.data() + at, from, std::min(dim, rows.size() - at) * sizeof(float));
    from += bytes;
  }
}

Work::Work(std::unique_ptr<State> state) : state_(std::move(state)) {}
Work::Work(Work&&) noexcept = default;
Work::~Work() {
  if (!state_ || state_->finished) return;
  try {
    state_->finish();
  } catch (const std::exception& error) {
    log::warn("ps", "a request that nobody waited for: {}", error.what());
    return;
  }
  if (state_->failed) log::warn("ps", "a request that nobody waited for failed: {}", state_->failed->what());
}

Pulled Work::wait() {
  state_->finish();
  if (state_->failed) throw *state_->failed;
  return state_->pulled;
}

Requests::Requests(Table::Impl& table) : table_(table), state_(std::make_unique<Work::State>()) {
  state_->client = table.client;
  state_->clock = table.client->clock;
  state_->dim = table.dim();
}

void Requests::pull(std::span<const std::uint64_t> keys, std::span<float> rows) {
  table_.client->demand_here("pull");
  demand_rows("pull", keys.size(), rows.size());
  std::vector<std::uint64_t> unique;
  state_->unique_of.resize(keys.size());
  {
    const std::lock_guard lock(table_.mutex);
    table_.sum.begin(0);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint32_t place = table_.sum.place_of(keys[i]);
      if (place == state_->first_of.size()) state_->first_of.push_back(static_cast<std::uint32_t>(i));
      state_->unique_of[i] = place;
    }
    unique = table_.sum.keys();
  }
  state_->rows = rows;
  ask(unique);
}

void Requests::pull_pieces(std::span<float> values) {
  table_.client->demand_here("pull");
  state_->rows = values;
  ask(pieces(values.size()));
}

void Requests::ask(const std::vector<std::uint64_t>& unique) {
  for (Part& part : parts(unique, kRead)) {
    Link& link = table_.client->links[part.server];
    std::string body = pack(Pull{table_.numbers[part.server], static_cast<std::uint32_t>(part.places.size()),
                                 state_->clock, link.patience_ms()},
                            part.places.size() * sizeof(std::uint64_t));
    append_keys(body, part, unique);
    const std::size_t room = part.places.size() * table_.dim() * sizeof(float) + 256;
    state_->sent.push_back({&link, link.send(Method::Pull, std::move(body), room), std::move(part.places), true});
  }
}

void Requests::push(std::span<const std::uint64_t> keys, std::span<const float> gradients, std::optional<double> lr) {
  table_.client->demand_here("push");
  demand_rows("push", keys.size(), gradients.size());
  demand_rate(lr);
  const std::lock_guard lock(table_.mutex);
  table_.sum.begin(table_.dim());
  for (std::size_t i = 0; i < keys.size(); ++i) table_.sum.add(keys[i], gradients.data() + i * table_.dim());
  const std::span<const float> sums(table_.sum.sums(), table_.sum.size() * table_.dim());
  demand_finite("push", "gradient", table_.sum.keys(), sums);
  change(Method::Push, table_.sum.keys(), sums, lr);
}

void Requests::push_pieces(std::span<const float> gradients, std::optional<double> lr) {
  table_.client->demand_here("push");
  demand_rate(lr);
  const std::vector<std::uint64_t> keys = pieces(gradients.size());
  demand_finite("push", "gradient", keys, gradients);
  change(Method::Push, keys, gradients, lr);
}

void Requests::assign_pieces(std::span<const float> values) {
  table_.client->demand_here("assign");
  const std::vector<std::uint64_t> keys = pieces(values.size());
  demand_finite("assign", "row", keys, values);
  change(Method::Assign, keys, values, std::nullopt);
}

void Requests::assign(std::span<const std::uint64_t> keys, std::span<const float> rows) {
  table_.client->demand_here("assign");
  demand_rows("assign", keys.size(), rows.size());
  const std::lock_guard lock(table_.mutex);
  table_.sum.begin(0);
  std::vector<float> last;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::size_t at = table_.sum.place_of(keys[i]) * table_.dim();
    last.resize(std::max(last.size(), at + table_.dim()));
    std::copy_n(rows.data() + i * table_.dim(), table_.dim(), last.data() + at);
  }
  demand_finite("assign", "row", table_.sum.keys(), last);
  change(Method::Assign, table_.sum.keys(), last, std::nullopt);
}

void Requests::erase(std::span<const std::uint64_t> keys) {
  table_.client->demand_here("erase");
  const std::lock_guard lock(table_.mutex);
  table_.sum.begin(0);
  for (const std::uint64_t key : keys) table_.sum.place_of(key);
  change(Method::Erase, table_.sum.keys(), {}, std::nullopt);
}

void Requests::demand_rate(std::optional<double> lr) const {
  if (!lr) return;
  if (!(*lr >= 0 && std::isfinite(*lr))) raise(ErrorCode::InvalidArgument, "push: a learning rate of {}", *lr);
  const auto* const ftrl = std::get_if<optim::Ftrl>(&table_.options.optimizer);
  if (ftrl == nullptr || *lr == ftrl->lr) return;
  raise(ErrorCode::InvalidArgument,
        "push to {} \"{}\": a learning rate of {}, and Ftrl's is {} for good: its memory of a row is scaled by the "
        "rate, so "
        "that another one would multiply the row -- leave the rate and schedules of it out, or take another optimizer "
        "(Adagrad)",
        table_.elements == 0 ? "table" : "variable", table_.name, *lr, ftrl->lr);
}

void Requests::demand_rows(const char* what, std::size_t keys, std::size_t floats) const {
  if (floats == keys * table_.dim()) return;
  raise(ErrorCode::InvalidArgument, "{} of table \"{}\": {} keys need {} floats, rows of {}, and these are {}", what,
        table_.name, keys, keys * table_.dim(), table_.dim(), floats);
}

std::vector<std::uint64_t> Requests::pieces(std::size_t floats) const {
  std::vector<std::uint64_t> keys((floats + table_.dim() - 1) / table_.dim());
  std::iota(keys.begin(), keys.end(), std::uint64_t{0});
  return keys;
}

void Requests::demand_finite(const char* what, const char* noun, const std::vector<std::uint64_t>& unique,
                             std::span<const float> rows) const {
  const std::size_t at = first_non_finite(rows);
  if (at == rows.size()) return;
  const float* const found = &rows[at];
  const std::uint64_t key = unique[at / table_.dim()];
  const std::size_t element = at % table_.dim();
  const std::string which =
      table_.elements == 0
          ? fmt::format("table \"{}\": the {} of key {} is {} at element {}", table_.name, noun, key, *found, element)
          : fmt::format("variable \"{}\": element {} is {}", table_.name, key * table_.dim() + element, *found);
  raise(ErrorCode::NonFinite, "{} to {} -- worker {} at clock {}; nothing was sent", what, which,
        table_.client->options.worker, state_->clock);
}

std::vector<Part> Requests::parts(const std::vector<std::uint64_t>& unique, std::size_t bytes) const {
  return parts_of(
      unique, table_.dim() * sizeof(float), bytes, [this](std::uint64_t key) { return table_.server_of(key); },
      table_.client->links.size());
}

void Requests::change(Method method, const std::vector<std::uint64_t>& unique, std::span<const float> rows,
                      std::optional<double> lr) {
  const std::size_t bytes = method == Method::Erase ? 0 : table_.dim() * sizeof(float);
  if (method == Method::Push && !unique.empty()) table_.client->demand_one_rate(table_, lr);
  const std::string_view all(reinterpret_cast<const char*>(rows.data()), rows.size_bytes());
  for (const Part& part : parts(unique, kChange)) {
    Link& link = table_.client->links[part.server];
    const std::size_t count = part.places.size();
    const auto build = [&](const Order& order) {
      std::string body = pack(Change{order, table_.numbers[part.server], static_cast<std::uint32_t>(count), lr},
                              count * (sizeof(std::uint64_t) + bytes), link.spare_body());
      append_keys(body, part, unique);
      const std::size_t whole = body.size() + count * bytes;
      for (const std::uint32_t place : part.places) {
        if (bytes > 0) body.append(all.substr(place * bytes, bytes));
      }
      body.resize(whole);
      return body;
    };
    state_->sent.push_back({&link, link.send_change(method, build)});
  }
}

}  // namespace cohort::ps
