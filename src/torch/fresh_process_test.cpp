// Each test begins with the process's usual number of threads, whatever an earlier test has set, since the bits of
// BatchNorm depend on that number.
#include <cohort/torch/torch_api.h>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

namespace cohort {
namespace {

class UsualThreads : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo& /*test*/) override { at::set_num_threads(usual_); }
  const int usual_ = at::get_num_threads();
};

[[maybe_unused]] const bool appended = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new UsualThreads);
  return true;
}();

}  // namespace
}  // namespace cohort
