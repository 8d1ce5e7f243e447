// Tests what a backward of DistributedDataParallel averages, and by which weights. The cases are in
// src/torch/ddp_forwards.txt, with which Python's class is tested as well.
#include <cohort/torch/nn.h>

#include <gtest/gtest.h>
#include <torch/autograd.h>

#include "torch/test_models.h"

#include <fstream>
#include <map>
#include <sstream>

namespace cohort {
namespace {

using Words = std::vector<std::string>;

struct Case {
  std::string name;
  std::vector<Words> lines;
};

std::vector<Case> read_cases() {
  std::ifstream file(COHORT_TEST_CASES "/ddp_forwards.txt");
  std::vector<Case> cases;
  for (std::string line; std::getline(file, line);) {
    std::istringstream stream(line);
    std::string first;
    if (!(stream >> first) || first[0] == '#' || first == "needs") continue;
    if (first == "case") {
      cases.push_back({.name = line.substr(5), .lines = {}});
      continue;
    }
    Words words{first};
    for (std::string word; stream >> word;) words.push_back(word);
    cases.back().lines.push_back(words);
  }
  return cases;
}

struct TimesWImpl : torch::nn::Module {
  TimesWImpl() { w = register_parameter("w", at::ones({1}, at::kDouble)); }
  at::Tensor forward(const at::Tensor& x) { return x * w; }
  at::Tensor w;
};

struct Pass {
  at::Tensor x, output, loss;
};

void carry_out(const Case& what, Communicator comm) {
  const auto net = std::make_shared<TimesWImpl>();
  nn::DistributedDataParallelOptions options;
  if (what.lines.front() == Words{"weights", "rows"})
    options.samples = [](const std::vector<at::Tensor>& inputs) { return inputs.front().size(0); };
  nn::DistributedDataParallel<TimesWImpl> model(net, comm, options);
  std::map<std::string, Pass> passes;
  std::string refused;
  for (const Words& line : what.lines) {
    const std::string& verb = line[0];
    const auto number = [&](std::size_t first) {
      return std::stoll(line[first + static_cast<std::size_t>(comm.rank())]);
    };
    std::optional<nn::NoSyncGuard> local;
    if (verb.rfind("local", 0) == 0) local.emplace(model.no_sync());
    if (verb == "forward" || verb == "local" || verb == "bypass") {
      Pass& pass = passes[line[1]];
      pass.x = at::full({number(2), 1}, comm.rank() + 1.0, at::kDouble).requires_grad_();
      pass.output = verb == "bypass" ? net->forward(pass.x) : model(pass.x);
      pass.loss = pass.output.mean();
    } else if (verb == "alone") {
      passes[line[1]].loss = 4 * (comm.rank() + 1) * net->w.sum();
    } else if (verb == "count") {
      model.set_sample_count(number(1));
    } else if (verb == "loss") {
      passes.at(line[1]).output.reset();
    } else if (verb == "drop") {
      passes.erase(line[1]);
    } else if (verb == "slope") {
      Pass& pass = passes.at(line[1]);
      const auto slopes = torch::autograd::grad({pass.loss}, {pass.x}, {}, {}, /*create_graph=*/true);
      pass.loss = pass.loss + slopes[0].sum();
    } else if (verb == "outside") {
      Pass& pass = passes.at(line[1]);
      pass.loss = pass.loss * net->w.sum();
    } else if (verb == "refused") {
      for (std::size_t i = 1; i < line.size(); ++i) refused += (i > 1 ? " " : "") + line[i];
    } else if (verb == "gradient") {
      EXPECT_DOUBLE_EQ(net->w.grad().item<double>(), std::stod(line[1]));
      EXPECT_EQ(model.stats().steps, std::stoll(line[2]));
      model.zero_grad();
    } else if (verb != "weights") {
      at::Tensor sum = at::zeros({}, at::kDouble);
      for (std::size_t i = 1; i < line.size(); ++i) sum = sum + passes.at(line[i]).loss;
      std::string error;
      try {
        sum.backward({}, /*retain_graph=*/verb.find("retained") != std::string::npos);
      } catch (const Error& raised) {
        error = raised.what();
        EXPECT_EQ(raised.code(), ErrorCode::Mismatch);
      }
      EXPECT_EQ(error.empty(), refused.empty()) << error;
      EXPECT_NE(error.find(refused), std::string::npos) << error;
      refused.clear();
    }
  }
}

TEST(DdpForwards, AveragesAndWeights) {
  const std::vector<Case> cases = read_cases();
  ASSERT_GE(cases.size(), 10U);
  for (const Case& one : cases) {
    SCOPED_TRACE(one.name);
    run_on_threads(2, [&](Communicator comm) {
      SCOPED_TRACE(one.name);
      carry_out(one, comm);
    });
  }
}

}  // namespace
}  // namespace cohort
