// Each test begins with a fresh status page, as in a new process. Otherwise a non-finite loss that an earlier test has
// logged there would change which checkpoints are kept.
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
