// Fits a picture with Gaussians in two dimensions, whose number changes while they are trained (the density control of
// Kerbl et al. 2023, 3D Gaussian splatting for real-time radiance field rendering): every --every steps, those that
// are still pulled are divided in two, and those that are hardly seen are removed.
#include <cohort/torch.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kSide = 64, kBatch = 512, kFirst = 40;  // of the picture; pixels of a step; Gaussians at first
constexpr double kPulled = 6e-3;   // mean norm of a position's gradient from which on a Gaussian is divided
constexpr double kLarge = 0.03;    // scale from which on its halves are smaller
constexpr double kUnseen = 0.1;    // opacity below which it is removed
constexpr double kPenalty = 2e-2;  // of the mean opacity, so that what the picture does not need fades

struct Options {
  int64_t steps = 600, every = 50;
  std::string out;
};

/// The picture to fit: the sun in the sky, over a striped hill. Pixels are [n, 2], from 0 to 1; returns [n, 3].
at::Tensor picture(const at::Tensor& pixels) {
  const at::Tensor x = pixels.narrow(1, 0, 1), y = pixels.narrow(1, 1, 1);
  const at::Tensor sky = torch::cat({0.2 + 0.5 * y, 0.4 + 0.4 * y, 0.9 - 0.1 * y}, 1);
  const at::Tensor sun = torch::tensor({0.95, 0.85, 0.2}), light = torch::tensor({0.3, 0.6, 0.2});
  const at::Tensor above = torch::where((x - 0.7).square() + (y - 0.3).square() < 0.02, sun, sky);
  const at::Tensor hill = torch::where((25 * (x + y)).sin() > 0, light, 0.4 * light);
  return torch::where(y > 0.65 + 0.1 * (7 * x).sin(), hill, above);
}

/// [n, ...] tensors, of which row i is the Gaussian i.
struct GaussiansImpl : torch::nn::Module {
  explicit GaussiansImpl(const at::Generator& generator) {
    register_parameter("positions", torch::rand({kFirst, 2}, generator));
    register_parameter("scales", torch::full({kFirst, 2}, std::log(0.08)));  // logarithms
    register_parameter("angles", torch::zeros({kFirst, 1}));
    register_parameter("colours", torch::zeros({kFirst, 3}));    // before the sigmoid
    register_parameter("opacities", torch::zeros({kFirst, 1}));  // before the sigmoid
  }

  at::Tensor& get(const std::string& name) { return parameters_[name]; }
  at::Tensor opacity() { return get("opacities").sigmoid(); }

  /// Vectors along the Gaussians' axes, [..., n, 2], as vectors of the picture (`back` = 1), or the other way (-1).
  at::Tensor turn(const at::Tensor& vectors, double back, const at::Tensor& angles) {
    const at::Tensor cosine = angles.cos().squeeze(1), sine = back * angles.sin().squeeze(1);
    const at::Tensor x = vectors.select(-1, 0), y = vectors.select(-1, 1);
    return torch::stack({x * cosine - y * sine, x * sine + y * cosine}, -1);
  }

  at::Tensor forward(const at::Tensor& pixels) {
    const at::Tensor away = turn(pixels.unsqueeze(1) - get("positions"), -1, get("angles"));  // [pixels, n, 2]
    const at::Tensor density = (-0.5 * (away / get("scales").exp()).square().sum(2)).exp();
    return density.matmul(opacity() * get("colours").sigmoid());
  }
};
TORCH_MODULE(Gaussians);

/// Replaces all parameters by these rows of theirs. The optimizer's moments of a row go with it, times `kept`
/// ([rows, 1]): 0 for copies, whose moments begin anew.
void take_rows(Gaussians& net, torch::optim::Adam& optimizer, const at::Tensor& rows, const at::Tensor& kept) {
  auto& states = optimizer.state();
  using Key = std::decay_t<decltype(states)>::key_type;  // of libtorch 1.13 a text of the address
  const auto key_of = [](const at::Tensor& parameter) {
    if constexpr (std::is_same_v<Key, std::string>)
      return (std::ostringstream() << parameter.unsafeGetTensorImpl()).str();
    else
      return static_cast<void*>(parameter.unsafeGetTensorImpl());
  };
  auto group = optimizer.param_groups().begin();  // one for each parameter
  for (const auto& item : net->named_parameters()) {
    const at::Tensor old = item.value(), now = old.detach().index_select(0, rows).requires_grad_();
    auto state = std::move(states.at(key_of(old)));
    states.erase(key_of(old));
    auto& moments = static_cast<torch::optim::AdamParamState&>(*state);
    moments.exp_avg(moments.exp_avg().index_select(0, rows) * kept);
    moments.exp_avg_sq(moments.exp_avg_sq().index_select(0, rows) * kept);
    states[key_of(now)] = std::move(state);
    (group++)->params()[0] = now;
    net->get(item.key()) = now;
  }
}

/// Divides and removes Gaussians; `pulls` [n] has the mean norms of their positions' gradients. Returns how many were
/// added and removed. Ranks decide alike without a message: averaged gradients and parameters are the same on all of
/// them to the bit, and all draw the same numbers. (The next forward makes parameters equal, but not an optimizer's
/// moments, and refuses sizes that differ.)
std::pair<int64_t, int64_t> change(Gaussians& net, torch::optim::Adam& optimizer, const at::Tensor& pulls,
                                   const at::Generator& generator) {
  const torch::NoGradGuard no_grad;
  const at::Tensor seen = net->opacity().squeeze(1) >= kUnseen;
  const at::Tensor kept = seen.nonzero().squeeze(1), divided = seen.logical_and(pulls > kPulled).nonzero().squeeze(1);
  const int64_t before = seen.size(0), added = divided.size(0), now = kept.size(0) + added;
  take_rows(net, optimizer, torch::cat({kept, divided}), torch::arange(now).lt(now - added).unsqueeze(1));

  // Both halves lie at random within the whole. Those of a large Gaussian are smaller, those of a small one fainter.
  const at::Tensor halves =
      torch::cat({(seen.cumsum(0) - 1).index_select(0, divided), torch::arange(now - added, now)});
  const at::Tensor scales = net->get("scales").index_select(0, halves);
  const at::Tensor within = torch::randn({2 * added, 2}, generator) * scales.exp();
  net->get("positions").index_add_(0, halves, net->turn(within, 1, net->get("angles").index_select(0, halves)));
  const at::Tensor large = scales.amax(1, true).exp() > kLarge;
  net->get("scales").index_add_(0, halves, torch::where(large, -std::log(1.6), 0.0).expand({-1, 2}));
  const at::Tensor opacity = net->opacity().index_select(0, halves);
  net->get("opacities").index_copy_(0, halves, torch::where(large, opacity, opacity / 2).logit());
  return {added, before - kept.size(0)};
}

void train(const Options& options) {
  cohort::Communicator comm = cohort::init();
  torch::set_num_threads(1);
  // In float64 the rounding of sums over different numbers of ranks is too small to decide what is divided.
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  if (kSide % comm.size() != 0) throw std::runtime_error("the number of processes has to divide 64");
  // All ranks begin with the same seed, and draw the same numbers in the same order.
  const at::Generator generator = torch::make_generator<torch::CPUGeneratorImpl>(1);
  Gaussians net(generator);
  cohort::nn::DistributedDataParallel model(net, comm);
  const std::map<std::string, double> rates = {
      {"positions", 2e-3}, {"scales", 1e-2}, {"angles", 1e-2}, {"colours", 2e-2}, {"opacities", 2e-2}};
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const auto& item : net->named_parameters()) {
    groups.emplace_back(std::vector<at::Tensor>{item.value()},
                        std::make_unique<torch::optim::AdamOptions>(rates.at(item.key())));
  }
  torch::optim::Adam optimizer(groups);

  const at::Tensor line = (torch::arange(kSide) + 0.5) / static_cast<double>(kSide);
  const at::Tensor pixels = torch::stack({line.repeat({kSide}), line.repeat_interleave(kSide)}, 1);
  const at::Tensor wanted = picture(pixels);
  const int64_t rows = kSide * kSide / comm.size(), part = kBatch / comm.size();
  const auto own = [&](const at::Tensor& all, int64_t count) { return all.narrow(0, comm.rank() * count, count); };
  at::Tensor pulls = torch::zeros({kFirst});
  for (int64_t step = 1; step <= options.steps; ++step) {
    // Each rank renders its part of the pixels of a step.
    const at::Tensor batch = own(torch::randint(pixels.size(0), {kBatch}, generator, torch::kLong), part);
    const at::Tensor loss = torch::mse_loss(model(pixels.index_select(0, batch)), wanted.index_select(0, batch));
    optimizer.zero_grad();
    (loss + kPenalty * net->opacity().mean()).backward();
    optimizer.step();
    pulls += net->get("positions").grad().norm(2, 1);
    if (step % options.every != 0 && step != options.steps) continue;

    const torch::NoGradGuard no_grad;
    const at::Tensor fitted = net->forward(own(pixels, rows));
    double error = torch::mse_loss(fitted, own(wanted, rows)).item<double>();
    comm.all_reduce(std::span(&error, 1), {.op = cohort::ReduceOp::Average}).wait();
    if (comm.rank() == 0) std::printf("step %ld: %ld Gaussians, %.2f dB", step, pulls.size(0), -10 * std::log10(error));
    if (step < options.steps) {
      // Gaussians are added in the first half only. The next forward takes the new parameters in, on all ranks.
      pulls.mul_(2 * step <= options.steps ? 1 / static_cast<double>(options.every) : 0);
      const auto [added, removed] = change(net, optimizer, pulls, generator);
      if (comm.rank() == 0) std::printf(", %ld added, %ld removed", added, removed);
      pulls = torch::zeros({net->get("positions").size(0)});
    }
    if (comm.rank() == 0) std::printf("\n");
    std::fflush(stdout);
  }
  model.require_same_parameters();
  if (options.out.empty()) return;
  const torch::NoGradGuard no_grad;
  const at::Tensor fitted = (net->forward(own(pixels, rows)).clamp(0, 1) * 255).round().to(torch::kUInt8);
  const at::Tensor whole = comm.all_gather(fitted);
  if (comm.rank() != 0) return;
  std::ofstream file(options.out, std::ios::binary);
  file << "P6 " << kSide << ' ' << kSide << " 255\n";
  file.write(static_cast<const char*>(whole.data_ptr()), whole.numel());
  if (!file.flush()) throw std::runtime_error("cannot write " + options.out);
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Fits a picture with Gaussians, whose number changes.");
  app.add_option("--steps", options.steps);
  app.add_option("--every", options.every, "steps between changes of their number")->check(CLI::PositiveNumber);
  app.add_option("--out", options.out, "file for the fitted picture, in the format PPM");
  CLI11_PARSE(app, argc, argv);
  try {
    train(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gaussians: %s\n", error.what());
    return 1;
  }
}
