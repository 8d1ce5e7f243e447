
#include "net/store.h"
#include "base/env.h"
#include "base/parse.h"
#include "base/result.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/served_store.h"

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace cohort::store {

std::vector<int> Store::Gathered::missing() const {
  std::vector<int> missing;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!values[i]) missing.push_back(static_cast<int>(i));
  }
  return missing;
}

Store::Found Store::get_any(std::span<const std::string> keys, Deadline deadline) {
  if (keys.empty()) raise(ErrorCode::InvalidArgument, "store: get_any of no keys");
  Gathered found = get_all({}, keys, deadline);
  if (found.ended) return *std::move(found.ended);
  raise(ErrorCode::Timeout, "{}: nobody set {} in time", name(), list_of_keys({keys.begin(), keys.end()}));
}

std::string Store::get(std::string_view key, Deadline deadline) {
  const std::string keys[] = {std::string(key)};
  return get_any(keys, deadline).value;
}

std::optional<std::string> Store::try_get(std::string_view key) {
  const std::string keys[] = {std::string(key)};
  return get_all(keys, {}, Deadline::min()).values.front();
}

Result<void> check_sizes(std::string_view key, std::string_view value) {
  if (key.size() > kLongestKey) {
    return fail(ErrorCode::InvalidArgument, "a store key of {} bytes ('{}...'): at most {} are allowed", key.size(),
                key.substr(0, 64), kLongestKey);
  }
  if (value.size() > kLongestValue) {
    return fail(ErrorCode::InvalidArgument, "a value of {} bytes under the store key '{}': at most {} are allowed",
                value.size(), key, kLongestValue);
  }
  return {};
}

std::string list_of_keys(const std::vector<std::string>& keys) {
  constexpr std::size_t kShown = 16;
  std::string text;
  for (std::size_t i = 0; i < keys.size() && i < kShown; ++i)
    text += fmt::format("{}'{}'", i == 0 ? "" : ", ", keys[i]);
  if (keys.size() > kShown) text += fmt::format(" and {} more", keys.size() - kShown);
  return text;
}

Result<void> Table::set(std::string_view key, std::string_view value) {
  if (auto checked = check_sizes(key, value); !checked) return checked;
  const auto found = entries_.find(key);
  if (found == entries_.end()) {
    entries_.emplace(key, value);
  } else {
    found->second = value;
  }
  return {};
}

const std::string* Table::find(std::string_view key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : &found->second;
}

Result<std::int64_t> Table::add(std::string_view key, std::int64_t amount) {
  const std::string* const old = find(key);
  const auto value = old == nullptr ? std::optional<std::int64_t>(0) : parse_integer<std::int64_t>(*old);
  if (!value) {
    return fail(ErrorCode::InvalidArgument, "cannot add {} to the store key '{}': its value '{}' is not a number",
                amount, key, old->substr(0, 32));
  }
  std::int64_t sum = 0;
  if (__builtin_add_overflow(*value, amount, &sum)) {
    return fail(ErrorCode::InvalidArgument, "cannot add {} to the store key '{}': {} would overflow", amount, key,
                *value);
  }
  if (auto done = set(key, std::to_string(sum)); !done) return tl::unexpected(done.error());
  return sum;
}

Result<std::optional<std::string>> Table::compare_and_set(std::string_view key,
                                                          std::optional<std::string_view> expected,
                                                          std::string_view desired) {
  const std::string* const old = find(key);
  const bool equal = old == nullptr ? !expected.has_value() : expected.has_value() && *expected == *old;
  if (!equal) return old == nullptr ? std::optional<std::string>() : std::optional<std::string>(*old);
  if (auto done = set(key, desired); !done) return tl::unexpected(done.error());
  return std::optional<std::string>(desired);
}

bool Table::settles(std::span<const std::string> keys, std::span<const std::string> unless) const {
  const auto exists = [this](const std::string& key) { return find(key) != nullptr; };
  return (keys.empty() ? unless.empty() : std::ranges::all_of(keys, exists)) || std::ranges::any_of(unless, exists);
}

Store::Gathered Table::gather(std::span<const std::string> keys, std::span<const std::string> unless) const {
  Store::Gathered found;
  for (const std::string& key : keys) {
    const std::string* const value = find(key);
    found.values.push_back(value == nullptr ? std::nullopt : std::optional(*value));
  }
  if (!keys.empty() && found.missing().empty()) return found;
  for (std::size_t i = 0; i < unless.size(); ++i) {
    if (const std::string* const value = find(unless[i])) return {{}, Store::Found{i, *value}};
  }
  return found;
}

bool Table::erase(std::string_view key) {
  const auto found = entries_.find(key);
  if (found == entries_.end()) return false;
  entries_.erase(found);
  return true;
}

namespace {

class InProcessStore final : public Store {
 public:
  void set(std::string_view key, std::string_view value) override {
    {
      const std::lock_guard lock(mutex_);
      value_or_throw(table_.set(key, value));
    }
    changed_.notify_all();
  }

  Gathered get_all(std::span<const std::string> keys, std::span<const std::string> unless, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return table_.settles(keys, unless); });
    return table_.gather(keys, unless);
  }

  std::int64_t add(std::string_view key, std::int64_t amount) override {
    std::unique_lock lock(mutex_);
    const std::int64_t sum = value_or_throw(table_.add(key, amount));
    lock.unlock();
    changed_.notify_all();
    return sum;
  }

  std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                             std::string_view desired) override {
    std::unique_lock lock(mutex_);
    auto now = value_or_throw(table_.compare_and_set(key, expected, desired));
    lock.unlock();
    changed_.notify_all();
    return now;
  }

  bool delete_key(std::string_view key) override {
    const std::lock_guard lock(mutex_);
    return table_.erase(key);
  }
  std::string name() const override { return "store"; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  store::Table table_;
};

}  // namespace

std::shared_ptr<Store> make_in_process_store() { return std::make_shared<InProcessStore>(); }

namespace {

class PrefixStore final : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store)
      : prefix_(std::move(prefix) + "/"), store_(std::move(store)) {
    if (!store_) raise(ErrorCode::InvalidArgument, "make_prefix_store('{}'): there is no store", prefix_);
  }

  void set(std::string_view key, std::string_view value) override { store_->set(full(key), value); }
  Gathered get_all(std::span<const std::string> keys, std::span<const std::string> unless, Deadline deadline) override {
    const auto all_full = [this](std::span<const std::string> short_keys) {
      std::vector<std::string> all;
      for (const std::string& key : short_keys) all.push_back(full(key));
      return all;
    };
    return store_->get_all(all_full(keys), all_full(unless), deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t amount) override { return store_->add(full(key), amount); }
  std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                             std::string_view desired) override {
    return store_->compare_and_set(full(key), expected, desired);
  }
  bool delete_key(std::string_view key) override { return store_->delete_key(full(key)); }
  std::string name() const override { return store_->name(); }

 private:
  std::string full(std::string_view key) const { return prefix_ + std::string(key); }

  const std::string prefix_;
  const std::shared_ptr<Store> store_;
};

}  // namespace

std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store) {
  return std::make_shared<PrefixStore>(std::move(prefix), std::move(store));
}

namespace {

// A piece is one message; it is far below the limit of a store, so that other requests are served in between.
constexpr std::size_t kPiece = std::size_t{8} << 20;

std::string piece_key(std::string_view key, std::int64_t number) { return fmt::format("{}/{}", key, number); }

std::string pieces_of(Store& store, std::string_view key, std::string_view number_text, Store::Deadline deadline) {
  const auto number = parse_integer<std::int64_t>(number_text);
  if (!number || *number < 0) {
    raise(ErrorCode::Corrupt, "store key '{}' does not say how many pieces there are", key);
  }
  std::string value;
  for (std::int64_t i = 0; i < *number; ++i) value += store.get(piece_key(key, i), deadline);
  return value;
}

}  // namespace

void set_large(Store& store, std::string_view key, std::string_view value) {
  std::int64_t number = 0;
  while (!value.empty()) {
    const std::size_t length = std::min(value.size(), kPiece);
    store.set(piece_key(key, number++), value.substr(0, length));
    value.remove_prefix(length);
  }
  store.set(key, std::to_string(number));
}

std::string get_large(Store& store, std::string_view key, Store::Deadline deadline) {
  const std::string number = store.get(key, deadline);
  return pieces_of(store, key, number, deadline);
}

std::optional<std::string> try_get_large(Store& store, std::string_view key, Store::Deadline deadline) {
  const auto number = store.try_get(key);
  if (!number) return std::nullopt;
  return pieces_of(store, key, *number, deadline);
}

void delete_large(Store& store, std::string_view key) {
  const auto text = store.try_get(key);
  const auto number = text ? parse_integer<std::int64_t>(*text) : std::nullopt;
  store.delete_key(key);
  for (std::int64_t i = 0; number && i < *number; ++i) store.delete_key(piece_key(key, i));
}

std::shared_ptr<Store> connect_job_store(Store::Deadline deadline) {
  const auto place = env::get(env::kStore);
  const auto descriptor = env::number(env::kSecretFd);
  if (!place || !descriptor) {
    raise(ErrorCode::Unavailable,
          "this process has no job whose store it could use -- {} and {} are set by `cohort run`", env::kStore,
          env::kSecretFd);
  }
  const net::Address address = value_or_throw(net::parse_address(*place));
  const net::Secret secret = value_or_throw(net::Secret::from_sealed_memfd(*descriptor));
  return connect_tcp_store(address.host, address.port, secret, deadline);
}

}  // namespace cohort::store
