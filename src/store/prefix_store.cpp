#include "base/result.h"

#include "store/store.h"

namespace cohort::store {
namespace {

class PrefixStore final : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store)
      : prefix_(std::move(prefix) + "/"), store_(std::move(store)) {
    if (!store_) raise(ErrorCode::InvalidArgument, "make_prefix_store('{}'): there is no store", prefix_);
  }

  void set(std::string_view key, std::string_view value) override { store_->set(full(key), value); }
  std::string get(std::string_view key, Deadline deadline) override { return store_->get(full(key), deadline); }
  std::optional<std::string> try_get(std::string_view key) override { return store_->try_get(full(key)); }
  void wait(std::span<const std::string> keys, Deadline deadline) override {
    std::vector<std::string> all;
    all.reserve(keys.size());
    for (const std::string& key : keys) all.push_back(full(key));
    store_->wait(all, deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t amount) override { return store_->add(full(key), amount); }
  std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                             std::string_view desired) override {
    return store_->compare_and_set(full(key), expected, desired);
  }
  bool delete_key(std::string_view key) override { return store_->delete_key(full(key)); }

 private:
  std::string full(std::string_view key) const { return prefix_ + std::string(key); }

  const std::string prefix_;
  const std::shared_ptr<Store> store_;
};

}  // namespace

std::shared_ptr<Store> make_prefix_store(std::string prefix, std::shared_ptr<Store> store) {
  return std::make_shared<PrefixStore>(std::move(prefix), std::move(store));
}

}  // namespace cohort::store
