// State that a method of training keeps between steps (residuals, error, Q). The step under way prepares it in place;
// it is committed when all ranks have accepted the step, or dropped with all that came before, on all ranks, when they
// have refused or skipped it. One thread at a time.
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

  /// The step under way writes to it from here on.
  void prepare() noexcept { prepared_ = true; }
  void commit() noexcept { prepared_ = false; }
  void drop() {
    prepared_ = false;
    clear();
  }
  /// The step has failed on this rank: what it has not written to is that of the step before.
  void lose() {
    if (prepared_) drop();
  }

 protected:
  /// To other memory: operations of a step that has failed may still write to what they were given.
  virtual void clear() = 0;

 private:
  bool prepared_ = false;
};

/// Values by name, as they are saved and restored.
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
  /// Whether it was restored, and nobody has asked for it since; claimed now.
  bool claim(const std::string& name) { return unclaimed_.erase(name) != 0; }
  /// A restored name that nobody has claimed.
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
