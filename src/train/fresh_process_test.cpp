// Each test begins as in a process of its own: what a test before it has written into the process' status page, where
// checkpoints look whether a loss was no number, is gone.
#include "telemetry/status_page.h"

#include <gtest/gtest.h>

namespace cohort {
namespace {

class FreshStatusPage : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& /*test*/) override {
    auto& page = const_cast<status::StatusLayout&>(status::StatusPage::own().layout());
    page.not_finite.state.store(status::NotFiniteStatus::None, std::memory_order_release);
  }
};

[[maybe_unused]] const bool appended = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new FreshStatusPage);
  return true;
}();

}  // namespace
}  // namespace cohort
