// `cohort watch`: shows a running or ended run on this or another machine, in the terminal or on a page. `cohort runs`:
// lists, removes and compares runs.
#include "base/env.h"
#include "base/hardware.h"
#include "base/result.h"
#include "base/signals.h"
#include "launch/output/live_run.h"
#include "net/address.h"
#include "net/socket.h"
#include "observe/watch/runs.h"
#include "observe/watch/screen.h"
#include "observe/watch/source.h"
#include "observe/watch/weights.h"
#include "shared/program.h"

#include <fmt/core.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace fs = std::filesystem;

namespace cohort::app {
namespace {

struct WatchArguments {
  std::string run, token_file;
  std::string address = "127.0.0.1";
  std::uint16_t port = 0;
  bool page = false;
  double interval = 5;
  watch::WatchOptions options;
};

/// Returns true if `place` is a page's address (HOST:PORT), and no folder has that name.
bool is_page(const std::string& place) {
  std::error_code error;
  return place.find(':') != std::string::npos && !fs::exists(place, error) && net::parse_address(place).has_value();
}

net::Secret token_of_page(const std::string& file) {
  if (!file.empty()) return value_or_throw(net::Secret::from_file(file));
  std::string typed;
  if (const auto variable = env::get(env::kPageToken)) {
    typed = *variable;
  } else {
    if (::isatty(0) != 0) fmt::print(stderr, "token: ");
    std::getline(std::cin, typed);
  }
  // Accepts the page's whole address in place of the token, since people copy it.
  if (const auto at = typed.find("token="); at != std::string::npos) typed.erase(0, at + 6);
  while (!typed.empty() && (typed.back() == '\r' || typed.back() == ' ')) typed.pop_back();
  const auto token = net::Secret::from_digits(typed);
  if (!token) {
    raise(ErrorCode::InvalidArgument,
          "a token of 64 hexadecimal digits is wanted -- it is in the address that `cohort watch --page` has printed; "
          "--token-file FILE, the variable COHORT_PAGE_TOKEN, or type it");
  }
  return *token;
}

/// The given run, or the newest.
fs::path find_run(const fs::path& given) {
  if (given.empty()) return newest_run("watch");
  fs::path folder = given.filename() == launch::kLiveFile || given.filename() == "run.jsonl"
                        ? (given.has_parent_path() ? given.parent_path() : fs::path("."))
                        : given;
  if (fs::is_directory(folder)) return folder;
  raise(ErrorCode::Unavailable,
        "watching {} failed -- there is no such folder -- give a run's folder, or HOST:PORT of a page", given.string());
}

void serve(const WatchArguments& arguments) {
  sys::SignalFd signals = value_or_throw(sys::SignalFd::create({SIGINT, SIGTERM, SIGHUP}));
  watch::RunFiles run(find_run(arguments.run));
  const net::Secret token = value_or_throw(arguments.token_file.empty() ? net::Secret::generate()
                                                                        : net::Secret::from_file(arguments.token_file));
  watch::PageServer server(run, {arguments.address, arguments.port}, token);
  const bool local = net::is_loopback_name(arguments.address);
  fmt::print("{}\n", server.url());
  if (local) {
    fmt::print("from another machine: ssh -N -L {0}:127.0.0.1:{0} {1}, then the same address\n", server.port(),
               sys::host_name());
  } else {
    fmt::print("this is HTTP without encryption: whoever can listen on the network sees the token and the page\n");
  }
  std::fflush(stdout);
  while (!signals.next()) (void)net::wait_ready(signals.fd(), POLLIN, net::deadline_in(std::chrono::hours(1)));
}

}  // namespace

static void add_watch(CLI::App& app, int& exit_status) {
  const auto arguments = std::make_shared<WatchArguments>();
  CLI::App* command = app.add_subcommand("watch", std::string(program_of("watch")->about));
  command->add_option(
      "RUN", arguments->run,
      "Folder of a run, or HOST:PORT of the page that another `cohort watch` serves [the newest in ./runs]");
  command->add_flag("--page", arguments->page, "Serve a page for browsers instead, and print its address");
  command->add_option("--port", arguments->port, "With --page: where [a free port]");
  command->add_option("--address", arguments->address, "With --page: the address to listen at")->capture_default_str();
  command->add_option("--token-file", arguments->token_file,
                      "A file of mode 0600 with the page's token, as `cohort secret FILE` makes it [a new one]");
  command->add_flag("--once", arguments->options.once, "Print how it is now, as text, and end");
  command->add_flag("--ascii", arguments->options.ascii, "No character beyond ASCII");
  command->add_option("--interval", arguments->interval, "Seconds between two lines where there is no terminal")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str();
  command->footer(
      "Examples: cohort watch runs/latest\n          cohort watch runs/latest --page\n          cohort watch "
      "localhost:40123 --token-file token");
  command->callback([arguments, &exit_status] {
    if (arguments->page) return serve(*arguments);
    if (arguments->port != 0) raise(ErrorCode::InvalidArgument, "--port is for --page, which is missing");
    arguments->options.interval = std::chrono::milliseconds(static_cast<std::int64_t>(arguments->interval * 1000));
    std::unique_ptr<watch::Source> source;
    if (is_page(arguments->run)) {
      source = std::make_unique<watch::RemotePage>(*net::parse_address(arguments->run),
                                                   token_of_page(arguments->token_file));
    } else {
      if (!arguments->token_file.empty())
        raise(ErrorCode::InvalidArgument, "--token-file is for --page and HOST:PORT, and neither is given");
      source = std::make_unique<watch::RunFiles>(find_run(arguments->run));
    }
    exit_status = watch::watch(*source, arguments->options);
  });
}

namespace {

struct RunsArguments {
  std::string folder = "runs";
  bool json = false;
  std::vector<std::string> runs;
  std::string older_than;
  int keep = -1;
  bool dry_run = false;
};

/// The run of this name in the folder, or at this path.
fs::path run_named(const RunsArguments& arguments, const std::string& run) {
  std::error_code error;
  const fs::path within = fs::path(arguments.folder) / run;
  return fs::exists(within, error) ? within : fs::path(run);
}

void remove_runs(const RunsArguments& arguments) {
  std::vector<watch::RunSummary> chosen;
  if (!arguments.runs.empty()) {
    if (!arguments.older_than.empty() || arguments.keep >= 0)
      raise(ErrorCode::InvalidArgument, "runs by name, or --older-than and --keep: give one");
    for (const std::string& run : arguments.runs) {
      watch::RunSummary one = watch::summary_of(run_named(arguments, run));
      const auto has_it = [&one](const watch::RunSummary& other) {
        return (one.folder / "").string().starts_with((other.folder / "").string());
      };
      if (std::none_of(chosen.begin(), chosen.end(), has_it)) chosen.push_back(std::move(one));
    }
  } else if (!arguments.older_than.empty() || arguments.keep >= 0) {
    chosen = watch::list_runs(arguments.folder);
    if (arguments.keep >= 0)
      chosen.resize(chosen.size() - std::min(chosen.size(), static_cast<std::size_t>(arguments.keep)));
    if (!arguments.older_than.empty()) {
      const double before = launch::seconds_now() - static_cast<double>(watch::parse_age(arguments.older_than).count());
      std::erase_if(chosen, [before](const watch::RunSummary& run) { return run.ended > before; });
    }
    std::erase_if(chosen, [](const watch::RunSummary& run) {
      if (run.state == "running" || (run.state == "lost" && run.elsewhere)) return true;
      try {
        watch::require_removable(run);
        return false;
      } catch (const Error& error) {
        fmt::print(stderr, "cohort: {}\n", error.what());
        return true;
      }
    });
  } else {
    raise(ErrorCode::InvalidArgument, "which runs? -- cohort runs rm RUN..., --older-than 30d, --keep 10");
  }
  for (const watch::RunSummary& run : chosen) watch::require_removable(run);  // removes all of them, or none
  std::uint64_t bytes = 0;
  for (const watch::RunSummary& run : chosen) {
    if (!arguments.dry_run) watch::remove_run(run);
    bytes += run.bytes;
    fmt::print("{} {} ({}, {})\n", arguments.dry_run ? "would remove" : "removed", run.folder.string(), run.state,
               watch::bytes_text(static_cast<double>(run.bytes)));
  }
  fmt::print("{} run{}, {}\n", chosen.size(), chosen.size() == 1 ? "" : "s",
             watch::bytes_text(static_cast<double>(bytes)));
}

/// Returns 1 if weights differ, so every error has the status of wrong use, 2.
int compare_runs(const RunsArguments& arguments) try {
  const auto comparison =
      watch::compare_weights(run_named(arguments, arguments.runs[0]), run_named(arguments, arguments.runs[1]));
  fmt::print("{}", arguments.json ? watch::to_json(comparison) : watch::to_text(comparison));
  return comparison.differ ? 1 : 0;
} catch (const Error& error) {
  raise(ErrorCode::InvalidArgument, "{}", error.what());
}

}  // namespace

static void add_runs(CLI::App& app, int& exit_status) {
  const auto arguments = std::make_shared<RunsArguments>();
  CLI::App* command = app.add_subcommand("runs", std::string(program_of("runs")->about));
  command->add_option("--folder", arguments->folder, "Where the runs are")->capture_default_str();
  command->add_flag("--json", arguments->json, "As a JSON array");
  command->footer(
      "Examples: cohort runs\n          cohort runs rm --older-than 30d --dry-run\n          cohort runs rm --keep 20\n"
      "          cohort runs rm 20261127-204744-train-1c4e\n          cohort runs compare first second");
  command->require_subcommand(0, 1)->fallthrough();
  CLI::App* remove = command->add_subcommand("rm", "Remove runs, with all in their folders; none that goes on");
  remove->add_option("RUN", arguments->runs, "Names in the folder, or paths");
  remove->add_option("--older-than", arguments->older_than, "Those that ended longer ago: 30d, 12h, 15m, seconds");
  remove->add_option("--keep", arguments->keep, "All but the newest so many")->check(CLI::NonNegativeNumber);
  remove->add_flag("--dry-run", arguments->dry_run, "Only say what would be removed");
  remove->footer("");
  CLI::App* compare = command->add_subcommand(
      "compare", "Say until which step two runs have the same weights, to the bit; exit status 1 if they differ");
  compare->add_option("RUNS", arguments->runs, "Two names in the folder, or paths")->required()->expected(2);
  compare->footer("");
  command->callback([arguments, remove, compare, &exit_status] {
    if (remove->parsed()) return remove_runs(*arguments);
    if (compare->parsed()) {
      exit_status = compare_runs(*arguments);
      return;
    }
    const auto runs = watch::list_runs(arguments->folder);
    fmt::print("{}", arguments->json ? watch::to_json(runs) : watch::to_table(runs));
  });
}

}  // namespace cohort::app

int main(int argc, char** argv) {
  return cohort::app::program_main(argc, argv, {cohort::app::add_watch, cohort::app::add_runs});
}
