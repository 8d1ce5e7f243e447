// A rank that gives its launcher a reason to warn, as its argument says: "nan" (and ends at once), "infinite", "still"
// (no step any more), "late" (rank 1, at each step), "slow" (all, from step 400 on), "fills" (the run's folder).
#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/init.h>
#include <cohort/track.h>

#include "telemetry/status_page.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <thread>

using std::chrono::milliseconds;

static void take_steps(int number, milliseconds each) {
  for (int i = 0; i < number; ++i) {
    std::this_thread::sleep_for(each);
    cohort::status::StatusPage::own().count_step();
  }
}

int main(int, char** arguments) {
  const std::string_view how = arguments[1];
  const std::filesystem::path folder = std::getenv("COHORT_RUN_DIR");
  try {
    if (how == "nan" || how == "infinite") {
      cohort::track::RunRecord record(folder / "run.jsonl", {.program = "peer", .parameters = {}});
      for (int step = 1; step < 6; ++step) {
        record.write("step", {{"step", step},
                              {"epoch", step / 5.0},
                              {"train_loss", 1.0 / step},
                              {"accuracy", std::numeric_limits<double>::quiet_NaN()}});
        std::this_thread::sleep_for(milliseconds(10));
      }
      const double bad =
          how == "nan" ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
      record.write("step", {{"step", 7}, {"epoch", 1.5}, {"train_loss", bad}});
      if (how == "infinite") std::this_thread::sleep_for(milliseconds(600));
    }
    if (how == "still") {
      take_steps(20, milliseconds(10));
      std::this_thread::sleep_for(std::chrono::seconds(4));
    }
    if (how == "slow") {
      take_steps(400, milliseconds(20));
      take_steps(100, milliseconds(80));
    }
    if (how == "late") {
      cohort::Communicator comm = cohort::init();
      std::array<float, 10> data{};
      for (int step = 0; step < 200; ++step) {
        std::this_thread::sleep_for(milliseconds(comm.rank() == 1 ? 45 : 10));
        comm.all_reduce(std::span(data)).wait();
        cohort::status::StatusPage::own().count_step();
      }
    }
    if (how == "fills") {
      std::ofstream(folder / "checkpoint") << std::string(std::size_t{3900} << 10, 'x');
      std::this_thread::sleep_for(std::chrono::seconds(8));
    }
    return 0;
  } catch (const cohort::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 3;
  }
}
