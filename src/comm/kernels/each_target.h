// For tests: runs a body once for each instruction set that this machine has, the plain one without vectors included.
// The choice is the process's: one test at a time.
#pragma once

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cstdint>

namespace cohort::comm::testing {

class EachTarget : public ::testing::Test {
 protected:
  template <class Body>
  void on_each(const Body& body) {
    const std::int64_t all = hwy::SupportedTargets();
    int targets = 0;
    for (std::int64_t rest = all; rest != 0; rest &= rest - 1) {
      use(rest & -rest);
      SCOPED_TRACE(hwy::TargetName(rest & -rest));
      body();
      ++targets;
    }
    use(0);
    EXPECT_GE(targets, 1);
  }
  void TearDown() override { use(0); }

 private:
  static void use(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

}  // namespace cohort::comm::testing
