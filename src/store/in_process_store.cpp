#include "store/table.h"

#include "store/store.h"

#include <condition_variable>
#include <mutex>

namespace cohort::store {
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

  std::string get(std::string_view key, Deadline deadline) override {
    const std::string keys[] = {std::string(key)};
    std::unique_lock lock(mutex_);
    wait_locked(lock, keys, deadline);
    return *table_.find(key);
  }

  std::optional<std::string> try_get(std::string_view key) override {
    const std::lock_guard lock(mutex_);
    const std::string* const value = table_.find(key);
    return value == nullptr ? std::nullopt : std::optional<std::string>(*value);
  }

  void wait(std::span<const std::string> keys, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    wait_locked(lock, keys, deadline);
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

 private:
  void wait_locked(std::unique_lock<std::mutex>& lock, std::span<const std::string> keys, Deadline deadline) {
    std::vector<std::string> missing;
    const auto all_there = [&] {
      missing.clear();
      for (const std::string& key : keys) {
        if (table_.find(key) == nullptr) missing.push_back(key);
      }
      return missing.empty();
    };
    if (!changed_.wait_until(lock, deadline, all_there)) {
      raise(ErrorCode::Timeout, "store: nobody set {} in time", store::list_of_keys(missing));
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  store::Table table_;
};

}  // namespace

std::shared_ptr<Store> make_in_process_store() { return std::make_shared<InProcessStore>(); }

}  // namespace cohort::store
