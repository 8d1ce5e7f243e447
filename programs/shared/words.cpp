#include "shared/words.h"

#include "base/parse.h"
#include "base/result.h"
#include "shared/program.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

namespace cohort::app {
namespace {

/// An option that people may type by habit, with our equivalent.
struct Foreign {
  std::string_view name;   ///< written with - in place of _
  std::string_view whose;  ///< launcher that has it; empty: `cohort run` had it (docs/design/decisions.md)
  std::string_view here;
};

constexpr Foreign kForeign[] = {
    {"--rdzv-conf", "torchrun", "leave it out: --start-timeout SECONDS is how long launchers wait for each other"},
    {"--local-addr", "torchrun", "--network NAME or ADDRESS/BITS"},
    {"--role", "torchrun", "leave it out: all ranks run one program"},
    {"--monitor-interval", "torchrun", "leave it out: the end of a rank is seen at once"},
    {"--log-dir", "torchrun", "--run-dir DIR: the logs are in DIR/logs; they are kept without it, too"},
    {"--redirects", "torchrun", "leave it out: each rank has its logs, and --ranks says which are shown"},
    {"--tee", "torchrun", "leave it out: each rank has its logs, and --ranks says which are shown"},
    {"--local-ranks-filter", "torchrun", "--ranks 0,3-5"},
    {"--num-proc", "horovodrun", "-np N"},
    {"--check-build", "horovodrun", "cohort doctor --build"},
    {"--output-filename", "horovodrun", "--run-dir DIR: the logs are in DIR/logs"},
    {"--ssh-port", "horovodrun", "--ssh 'ssh -p PORT'"},
    {"--network-interfaces", "horovodrun", "--network NAME"},
    {"--gloo", "horovodrun", "leave it out: Cohort moves the data itself"},
    {"--mpi", "horovodrun", "--env COHORT_TRANSPORT=mpi"},
    {"--verbose", "horovodrun and mpirun", "COHORT_LOG=debug `cohort run` ..."},
    {"-v", "mpirun", "COHORT_LOG=debug `cohort run` ..."},
    {"-x", "mpirun", "--env NAME[=VALUE]; ranks have the whole environment without it"},
    {"-c", "mpirun", "-np N"},
    {"-N", "mpirun and srun", "--per-node N for ranks of each host, --nodes N for hosts"},
    {"--npernode", "mpirun", "--per-node N"},
    {"-ppn", "mpiexec", "--per-node N"},
    {"-genv", "mpiexec", "--env NAME=VALUE"},
    {"--machinefile", "mpirun", "--hostfile FILE"},
    {"--hostfile", "mpirun", "--hostfile FILE"},
    {"--host", "mpirun", "-H HOST:N,..."},
    {"--oversubscribe", "mpirun", "leave it out: there may be more ranks than cores"},
    {"--allow-run-as-root", "mpirun", "leave it out: root may start jobs"},
    {"--bind-to", "mpirun", "--bind core, or none"},
    {"--map-by", "mpirun", "leave it out: hosts are filled in the order of their list; --bind core shares out cores"},
    {"--tag-output", "mpirun", "leave it out: lines have their rank in front (--prefix)"},
    {"--mca", "mpirun", "--env OMPI_MCA_NAME=VALUE; only COHORT_TRANSPORT=mpi uses MPI"},
    {"--wdir", "mpirun", "leave it out: ranks start in the folder that this command is in"},
    {"--ntasks", "srun", "-np N"},
    {"--ntasks-per-node", "srun", "--per-node N"},
    {"--label", "srun", "leave it out: lines have their rank in front (--prefix)"},
    {"--num-processes", "accelerate launch", "-np N"},
    {"--num-machines", "accelerate launch", "-H a,b, or --nodes N of a list"},
    {"--num-cpu-threads-per-process", "accelerate launch", "--env OMP_NUM_THREADS=N"},
    {"--master", "", "--master-addr HOST and --master-port PORT"},
    {"--output-dir", "", "--run-dir DIR: the logs are in DIR/logs"},
    {"--output-timeout", "", "leave it out: a reader of the output has 10 s at the end"},
    {"--status", "", "-q or --prefix none, which leave the line out"},
    {"--invitation-fd", "", "--agents N,FD"},
    {"--owner-folder", "", "--owner PID,DIR"},
};

/// Returns a word in the form that CLI11 takes. CLI11 reads -np as -n with the value p, but for people from MPI it is
/// one word (also as -np4 and -nproc), like other launchers' options that CLI11 would read as several of ours (-mca).
/// To CLI11, torchrun's --node_rank is unknown, the value of `-n=4` begins with =, and the value of `--run-dir=` is the
/// next word.
std::vector<std::string> spelled(const CLI::App& command, const std::string& word) {
  if (word.size() < 2 || word[0] != '-' || word == "--") return {word};
  const auto find = [&command](const std::string& name) { return command.get_option_no_throw(name); };
  const auto equals = std::min(word.find('='), word.size());
  std::string name = word.substr(0, equals);
  if (name.size() > 3 && name.starts_with("-np") && name[3] >= '0' && name[3] <= '9') return {"--np", word.substr(3)};
  if (name.starts_with("--"))
    std::ranges::replace(name, '_', '-');
  else if (name.starts_with("-np") && find("-" + name) != nullptr)
    name.insert(0, "-");
  else if (name.starts_with("-np") || (find(name) == nullptr && !foreign_option(name).empty()))
    return {"--" + word};  // no launcher's option
  const CLI::Option* const option = find(name.starts_with("--") ? name : std::string("-") + name.back());
  if (option == nullptr) return {word};
  if (equals == word.size()) return {name};
  std::string value = word.substr(equals + 1);
  if (takes_value(*option)) return {name, value};
  if (name.size() == 2 && !option->get_lnames().empty()) name = "--" + option->get_lnames().front();
  return {name.starts_with("--") ? name + "=" + (value.empty() ? " " : value) : "--" + word};
}

/// True if the next word is the value of this one, which may be several short options.
bool wants_value(const CLI::App& command, const std::string& word) {
  if (word.starts_with("--")) {
    const CLI::Option* const option = command.get_option_no_throw(word);
    return option != nullptr && takes_value(*option);
  }
  for (std::size_t at = 1; at < word.size(); ++at) {
    const CLI::Option* const option = command.get_option_no_throw(std::string("-") + word[at]);
    if (option == nullptr || takes_value(*option)) return option != nullptr && at + 1 == word.size();
  }
  return false;
}

void require_one(const std::string& name, const std::vector<std::string>& values) {
  if (values.size() < 2) return;
  raise(ErrorCode::InvalidArgument, "{} is given twice, with {} and {}", name == "--np" ? "-np" : name, values[0],
        values[1]);
}

[[noreturn]] void refuse(const CLI::App& parser, const std::string& name, std::string_view advice) {
  const std::string foreign = parser.get_name() == "run" ? foreign_option(name) : std::string();
  if (!foreign.empty()) raise(ErrorCode::InvalidArgument, "`cohort run` has no option {}: it {}", name, foreign);
  const std::string meant = name.size() > 2 ? closest(name, option_names(parser)) : "";
  raise(ErrorCode::InvalidArgument, "`cohort {}` has no option {}{}; {}", parser.get_name(), name,
        meant.empty() ? "" : "; did you mean " + meant + "?", advice);
}

}  // namespace

std::string foreign_option(std::string_view word) {
  std::string name(word.substr(0, word.find('=')));
  std::ranges::replace(name, '_', '-');
  name.erase(0, name.find_first_not_of('-'));  // mpirun accepts its long options with one dash, too
  for (const Foreign& foreign : kForeign) {
    if (foreign.name.substr(foreign.name.find_first_not_of('-')) != name) continue;
    return (foreign.whose.empty() ? "was removed; now: " : "is " + std::string(foreign.whose) + "'s; here: ") +
           std::string(foreign.here);
  }
  return {};
}

std::string truth(const std::string& value, const std::string& origin) {
  if (const auto said = parse_truth(value)) return *said ? "true" : "false";
  raise(ErrorCode::InvalidArgument, "{}: true or false is wanted, not '{}'", origin, value);
}

void add_options(CLI::App& command, const std::vector<RunPart>& parts) {
  for (const RunPart& part : parts) {
    const std::string title(part.title);
    for (const RunOption* option : part.options) {
      const std::string names(option->names), help(option->help);
      CLI::Option& added = option->is_flag() ? *command.add_flag(names, help) : *command.add_option(names, help);
      added.group(title);
      if (!option->is_flag())
        added.multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
            ->type_name(option->shown_type())
            ->default_str(std::string(option->standard));
      if (option->name() != "--config" || title.empty()) continue;
      command.set_help_all_flag("--help-all", "Print all options, by topic")->group(title);
      command.get_option("--help")->group(title);
    }
  }
}

Words read_words(CLI::App& parser, const std::vector<RunPart>& parts, const std::vector<std::string>& typed,
                 std::string_view advice) {
  parser.prefix_command();  // from the program on nothing is an option
  std::vector<std::string> words;
  std::vector<std::size_t> origins;  // in `typed`
  for (std::size_t at = 0; at < typed.size(); ++at) {
    if (typed[at].size() < 2 || typed[at][0] != '-' || typed[at] == "--") {  // the program's own words
      for (; at < typed.size(); ++at) words.push_back(typed[at]), origins.push_back(at);
      break;
    }
    std::vector<std::string> one = spelled(parser, typed[at]);
    origins.resize(words.size() + one.size(), at);
    const bool waits = one.size() == 1 && wants_value(parser, one[0]);
    std::ranges::move(one, std::back_inserter(words));
    // Horovod's option of two words.
    if (words.back() == "--blacklist-cooldown-range" && at + 2 < typed.size() && parse_integer<int>(typed[at + 1]) &&
        parse_integer<int>(typed[at + 2])) {
      words.push_back(typed[at + 1] + "," + typed[at + 2]);
      origins.push_back(at);
      at += 2;
    } else if (waits) {
      if (at + 1 == typed.size() || typed[at + 1] == "--")
        raise(ErrorCode::InvalidArgument, "{} wants a value", words.back());
      words.push_back(typed[++at]);  // a value is what was typed, whatever it looks like
      origins.push_back(at);
    }
  }
  try {
    parse_words(parser, words);
  } catch (const CLI::ArgumentMismatch&) {
    for (const CLI::Option* option : parser.get_options()) {
      if (option->get_multi_option_policy() != CLI::MultiOptionPolicy::TakeAll)
        require_one(option->get_name(), option->results());
    }
    throw;
  }
  const std::vector<std::string> rest = parser.remaining();
  const bool separated = !rest.empty() && rest.front() == "--";
  if (!rest.empty() && !separated && rest.front().size() > 1 && rest.front()[0] == '-') {
    std::string name = rest.front().substr(rest.front().starts_with("---") ? 2 : 0);
    if (name.starts_with("--")) std::ranges::replace(name, '_', '-');
    refuse(parser, name.substr(0, name.find('=')), advice);
  }
  Words read;
  read.separated = separated;
  if (const std::size_t begin = words.size() - rest.size() + (separated ? 1 : 0); begin < words.size())
    read.program.assign(typed.begin() + static_cast<std::ptrdiff_t>(origins[begin]), typed.end());
  for (const RunPart& part : parts) {
    for (const RunOption* option : part.options) {
      std::vector<std::string> values = parser.get_option(option->name())->results();
      if (values.empty()) continue;
      if (!option->is_repeatable() && !option->is_flag()) require_one(option->name(), values);
      for (std::string& value : values) {
        if (option->is_flag()) value = truth(value, option->name());
      }
      read.given[option] = std::move(values);
    }
  }
  return read;
}

}  // namespace cohort::app
