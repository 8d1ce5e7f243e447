// Predicts who clicks on what, in C++ and without libtorch: rows of users and of items on parameter servers; the
// product of the two says how likely a click is. The clicks are those of clicks.py, without the time of day.
//   cohort run -np 2 --servers 2 build/release/bin/clicks
#include <cohort/ps.h>
#include <cohort/role.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

namespace {

constexpr std::uint64_t kUsers = 20'000, kItems = 500, kKinds = 4;
constexpr int kSteps = 1600;
constexpr std::size_t kBatch = 1024, kWidth = 32;  // clicks of a step, over all workers; floats of a row

struct Clicks {
  std::vector<std::uint64_t> users, items;
  std::vector<float> clicked, likely;
};

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Clicks make_clicks(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  Clicks clicks;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t user = random() % kUsers, item = random() % kItems;
    const double likely = sigmoid(user % kKinds == item % kKinds ? 1.5 : -1.5);
    clicks.users.push_back(user);
    clicks.items.push_back(item);
    clicks.likely.push_back(static_cast<float>(likely));
    clicks.clicked.push_back(std::uniform_real_distribution<>()(random) < likely ? 1.0F : 0.0F);
  }
  return clicks;
}

/// How often a click has the higher score of a pair.
double auc(const std::vector<float>& scores, const std::vector<float>& clicked) {
  std::vector<std::size_t> order(scores.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[a] < scores[b]; });
  double ranks = 0, ones = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (clicked[order[i]] == 0) continue;
    ranks += static_cast<double>(i) + 1;
    ++ones;
  }
  return (ranks - ones * (ones + 1) / 2) / (ones * (static_cast<double>(scores.size()) - ones));
}

struct Rows {
  explicit Rows(std::size_t count) : users(count * kWidth), items(count * kWidth) {}
  std::vector<float> users, items;
  float score(std::size_t i) const {
    float sum = 0;
    for (std::size_t k = i * kWidth; k < (i + 1) * kWidth; ++k) sum += users[k] * items[k];
    return sum;
  }
};

void train() {
  auto client = cohort::ps::Client::connect();
  cohort::ps::TableOptions options;
  options.dim = kWidth;
  options.optimizer = cohort::ps::optim::Adagrad{.lr = 0.05};
  options.initializer = cohort::ps::Initializer::normal(0, 0.1);
  auto users = client.table("users", options), items = client.table("items", options);
  const auto read = [&](const Clicks& clicks, Rows& rows) {
    auto reading = users.pull(clicks.users, rows.users);
    items.pull(clicks.items, rows.items).wait();
    reading.wait();
  };

  const std::size_t mine = kBatch / static_cast<std::size_t>(client.workers());
  Rows rows(mine), gradients(mine);
  for (int step = 0; step < kSteps; ++step) {
    const Clicks clicks = make_clicks(mine, static_cast<std::uint64_t>(step * client.workers() + client.worker()));
    read(clicks, rows);
    for (std::size_t i = 0; i < mine; ++i) {
      const float error = (static_cast<float>(sigmoid(rows.score(i))) - clicks.clicked[i]) / static_cast<float>(kBatch);
      for (std::size_t k = i * kWidth; k < (i + 1) * kWidth; ++k) {
        gradients.users[k] = error * rows.items[k];
        gradients.items[k] = error * rows.users[k];
      }
    }
    auto pushing = users.push(clicks.users, gradients.users);
    items.push(clicks.items, gradients.items).wait();
    pushing.wait();
    client.clock();  // all workers' gradients of this step make one step
  }
  client.barrier();
  if (client.worker() == 0) {
    const Clicks clicks = make_clicks(50'000, 1ULL << 40);
    Rows all(clicks.users.size());
    read(clicks, all);
    std::vector<float> scores;
    for (std::size_t i = 0; i < clicks.users.size(); ++i) scores.push_back(all.score(i));
    std::printf("AUC %.4f, at best %.4f\n", auc(scores, clicks.clicked), auc(clicks.likely, clicks.clicked));
  }
}

}  // namespace

int main() {
  try {
    if (cohort::role() == cohort::Role::Server) {
      cohort::ps::serve();
    } else {
      train();
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "clicks: %s\n", error.what());
    return 1;
  }
  return 0;
}
