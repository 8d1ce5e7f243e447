// State that a method of training keeps between steps (residuals, error, Q). The step under way changes the state in
// place. The state is committed when all ranks have accepted the step. When they have refused or skipped the step, all
// ranks drop the whole state, including that of earlier steps. One thread at a time.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

namespace cohort::step {

class Kept {
 public:
  Kept() = default;
  virtual ~Kept() = default;
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  /// Notes that the step under way writes to the state from now on.
  void prepare() noexcept { prepared_ = true; }
  void commit() noexcept { prepared_ = false; }
  void drop() {
    prepared_ = false;
    clear();
  }
  /// Drops the state if the failed step has written to it; otherwise the state of the step before is still valid.
  void lose() {
    if (prepared_) drop();
  }

 protected:
  /// Clears the state by moving it to new memory: operations of a failed step may still write to the old memory.
  virtual void clear() = 0;

 private:
  bool prepared_ = false;
};

/// State by name, which is saved and restored.
template <class T>
class KeptByName final : public Kept {
 public:
  const std::map<std::string, T>& values() const noexcept { return values_; }
  T& operator[](const std::string& name) { return values_[name]; }
  const T& at(const std::string& name) const { return values_.at(name); }

  void restore(std::map<std::string, T> values) {
    values_ = std::move(values);
    unclaimed_.clear();
    for (const auto& [name, value] : values_) unclaimed_.insert(name);
  }
  /// Returns whether the name was restored and not claimed since; it is claimed now.
  bool claim(const std::string& name) { return unclaimed_.erase(name) != 0; }
  /// Returns a restored name that nobody has claimed, if there is one.
  std::optional<std::string> unclaimed() const {
    return unclaimed_.empty() ? std::nullopt : std::optional(*unclaimed_.begin());
  }

 private:
  void clear() override {
    for (auto& [name, value] : values_) value.clear();
  }

  std::map<std::string, T> values_;
  std::set<std::string> unclaimed_;
};

}  // namespace cohort::step
