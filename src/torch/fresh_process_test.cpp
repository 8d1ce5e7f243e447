// Each test begins with the process' usual number of threads, whatever one before it has set: bits of BatchNorm depend
// on it.
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
