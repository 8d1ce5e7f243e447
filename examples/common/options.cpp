#include "options.h"

#include <cohort/error.h>

#include <CLI/CLI.hpp>

#include <cstdlib>
#include <ctime>
#include <map>
#include <sstream>

namespace {

// The run's folder if `cohort run` made one, else a new one.
std::filesystem::path default_out() {
  if (const char* folder = std::getenv("COHORT_RUN_DIR"); folder != nullptr && *folder != '\0') return folder;
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  gmtime_r(&now, &utc);
  char name[64];
  std::strftime(name, sizeof name, "%Y%m%d-%H%M%S-digits", &utc);
  return std::filesystem::path("runs") / name;
}

std::map<std::string, cohort::WireFormat> wire_formats() {
  std::map<std::string, cohort::WireFormat> formats;
  for (int i = 0; i < cohort::kWireFormatCount; ++i) {
    const auto format = static_cast<cohort::WireFormat>(i);
    formats.emplace(cohort::to_string(format), format);
  }
  return formats;
}

}  // namespace

Options parse_options(int argc, char** argv, int rank, int world_size) {
  Options options;
  int64_t batch = 64;
  CLI::App app(
      "Trains a small convolutional network on handwritten digits, on as many processes as it is started with.",
      "digits");
  app.add_option("--data", options.data, "folder with MNIST's IDX files, plain or .gz (default: the shipped digits)");
  app.add_option("--out", options.out, "folder for record, checkpoints, weights (default: the run's folder)");
  app.add_option("--epochs", options.epochs, "times through the data; the learning rate falls to 0 over them")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  auto* global = app.add_option("--batch-size", batch, "samples per step, over all processes together")
                     ->capture_default_str()
                     ->check(CLI::PositiveNumber);
  auto* own =
      app.add_option("--batch-per-process", options.batch_per_process,
                     "samples per step of each process instead; the learning rate then grows with their number, "
                     "during the first epoch")
          ->check(CLI::PositiveNumber)
          ->excludes(global);
  app.add_option("--lr", options.lr, "learning rate")->capture_default_str()->check(CLI::NonNegativeNumber);
  app.add_option("--seed", options.seed, "of weights, order and shifts")->capture_default_str();
  app.add_option("--shift", options.shift, "training images are moved by up to this many pixels, anew in each epoch")
      ->capture_default_str()
      ->check(CLI::Range(0, 14));
  app.add_option("--threads", options.threads, "threads of each process (default: OMP_NUM_THREADS, else all cores)")
      ->check(CLI::PositiveNumber);
  app.add_option("--device", options.device, "cpu, or cuda: of the host's GPUs the one with the process's local rank")
      ->capture_default_str()
      ->check(CLI::IsMember({"cpu", "cuda"}));
  auto* local = app.add_option("--local-steps", options.local_steps,
                               "each process steps parameters of its own, and every so many steps all take their "
                               "average: for slow networks")
                    ->check(CLI::PositiveNumber);
  app.add_option("--delay", options.delay, "steps during which such an average travels")
      ->check(CLI::NonNegativeNumber)
      ->needs(local);
  const auto formats = wire_formats();
  app.add_option_function<std::string>(
         "--wire-format", [&](const std::string& name) { options.wire_format = formats.at(name); },
         "what gradients, or averages, travel as between hosts (default: none, as they are)")
      ->check(CLI::IsMember(formats));
  app.add_option("--save-every", options.save_every,
                 "steps from one checkpoint to the next; at the end of an epoch, and when preempted, there is one "
                 "in any case")
      ->check(CLI::PositiveNumber);
  app.add_flag("--resume", options.resume, "go on from the newest checkpoint in --out, if there is one");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream ignored;
    std::exit(rank == 0 ? app.exit(error) : app.exit(error, ignored, ignored));
  }

  const bool out_given = !options.out.empty();
  if (!out_given) options.out = default_out();
  if (options.resume && !out_given && std::getenv("COHORT_RUN_DIR") == nullptr) {
    throw cohort::Error(cohort::ErrorCode::InvalidArgument,
                        "--resume needs --out, the folder of the run to go on with");
  }
  options.batch_grows = own->count() > 0;
  if (options.batch_grows) return options;
  // A batch that nobody asked for may be a little larger, so that every number of processes works.
  if (global->count() == 0) batch = (batch + world_size - 1) / world_size * world_size;
  if (batch % world_size != 0) {
    throw cohort::Error(cohort::ErrorCode::InvalidArgument, "--batch-size " + std::to_string(batch) +
                                                                " cannot be spread evenly over " +
                                                                std::to_string(world_size) + " processes -- try " +
                                                                std::to_string((batch / world_size + 1) * world_size));
  }
  options.batch_per_process = batch / world_size;
  return options;
}
