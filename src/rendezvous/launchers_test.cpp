// Variables of each launcher, and the identity that they give a process.
#include "rendezvous/launchers.h"
#include "rendezvous/detect.h"

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <fstream>
#include <map>
#include <set>

namespace cohort::rendezvous {
namespace {

using Names = std::vector<std::string>;

#define EXPECT_CONTAINS(text, part) EXPECT_NE(std::string(text).find(part), std::string::npos) << "in: " << (text)

Environment with(Environment environment, const Environment& more) {
  for (const auto& [name, value] : more) environment[name] = value;  // an empty value counts as not set
  return environment;
}

// As Open MPI 4.1.4, MPICH 4.0.2 and Slurm 22.05 set them (the rest left out).
const Environment kOpenMpi = {
    {"OMPI_COMM_WORLD_RANK", "1"},       {"OMPI_COMM_WORLD_SIZE", "4"},
    {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
    {"OMPI_COMM_WORLD_NODE_RANK", "3"},  {"OMPI_MCA_orte_hnp_uri", "1001127936.0;tcp://192.0.2.2:57253"},
    {"OMPI_MCA_orte_num_nodes", "2"},    {"OMPI_UNIVERSE_SIZE", "8"},
    {"PMIX_NAMESPACE", "1001127937"},    {"PMIX_RANK", "1"}};
const Environment kHydra = {{"MPI_LOCALNRANKS", "2"}, {"MPI_LOCALRANKID", "0"},
                            {"PMI_FD", "6"},          {"PMI_RANK", "2"},
                            {"PMI_SIZE", "4"},        {"MPIR_CVAR_CH3_INTERFACE_HOSTNAME", "b"}};
const Environment kSlurm = {{"SLURM_CLUSTER_NAME", "c"},
                            {"SLURM_JOB_ID", "17"},
                            {"SLURM_STEP_ID", "0"},
                            {"SLURM_PROCID", "4"},
                            {"SLURM_LOCALID", "0"},
                            {"SLURM_NODEID", "1"},
                            {"SLURM_NTASKS", "6"},
                            {"SLURM_STEP_NUM_TASKS", "6"},
                            {"SLURM_STEP_NUM_NODES", "4"},
                            {"SLURM_STEP_NODELIST", "n[08-11]"},
                            {"SLURM_STEP_TASKS_PER_NODE", "3,1(x3)"}};
const Environment kHorovod = {{"HOROVOD_RANK", "3"},
                              {"HOROVOD_SIZE", "4"},
                              {"HOROVOD_LOCAL_RANK", "1"},
                              {"HOROVOD_LOCAL_SIZE", "2"},
                              {"HOROVOD_CROSS_RANK", "1"},
                              {"HOROVOD_CROSS_SIZE", "2"},
                              {"HOROVOD_HOSTNAME", "b"},
                              {"HOROVOD_CONTROLLER", "gloo"},
                              {"HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1"},
                              {"HOROVOD_GLOO_RENDEZVOUS_PORT", "4711"}};
const Environment kTorchrun = {
    {"RANK", "2"},       {"WORLD_SIZE", "4"},  {"LOCAL_RANK", "0"},      {"LOCAL_WORLD_SIZE", "2"},
    {"GROUP_RANK", "1"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "29500"}, {"TORCHELASTIC_RUN_ID", "none"}};
const Environment kPod = {
    {"RANK", "1"},       {"WORLD_SIZE", "3"},    {"MASTER_ADDR", "job-master-0"}, {"MASTER_PORT", "23456"},
    {"PET_NNODES", "3"}, {"PET_NODE_RANK", "1"}, {"PET_MASTER_PORT", "23456"},    {"PET_MASTER_ADDR", "job-master-0"}};
const Environment kSageMaker = {{"SM_CURRENT_HOST", "algo-10"},
                                {"SM_HOSTS", R"(["algo-1","algo-10","algo-2"])"},
                                {"SM_NUM_GPUS", "4"},
                                {"CURRENT_HOST", "algo-10"}};
const Environment kTfJob = {
    {"TF_CONFIG",
     R"({"cluster":{"chief":["j-chief-0.ns.svc:2222"],"ps":["j-ps-0.ns.svc:2222"],"worker":["j-worker-0.ns.svc:2222",)"
     R"("j-worker-1.ns.svc:2222"]},"task":{"type":"worker","index":1},"environment":"cloud"})"}};
const Environment kVolcano = {{"VC_TASK_INDEX", "1"},
                              {"VK_TASK_INDEX", "1"},
                              {"VC_WORKER_HOSTS", "j-worker-0.j,j-worker-1.j"},
                              {"VC_WORKER_NUM", "2"}};
const Environment kJsrun = {
    {"JSM_NAMESPACE_RANK", "5"},       {"JSM_NAMESPACE_SIZE", "8"}, {"JSM_NAMESPACE_LOCAL_RANK", "1"},
    {"JSM_NAMESPACE_LOCAL_SIZE", "4"}, {"LSB_JOBID", "9"},          {"LSB_MCPU_HOSTS", "launch 1 h1 4 h2 4"}};

struct GoodLaunch {
  Environment environment;
  std::string launcher;
  int rank, size;
  std::optional<int> local_rank, local_size;
  Meeting meeting;
};

TEST(Launchers, EachSaysWhoAProcessIs) {
  const GoodLaunch cases[] = {
      {kTorchrun, "torchrun", 2, 4, 0, 2, Meeting::Master},
      {kOpenMpi, "Open MPI", 1, 4, 1, 2, Meeting::Launcher},
      {kHydra, "MPI (PMI)", 2, 4, 0, 2, Meeting::Launcher},
      {kSlurm, "Slurm", 4, 6, 0, 1, Meeting::Launcher},
      {kHorovod, "Horovod", 3, 4, 1, 2, Meeting::Launcher},
      {kPod, "Kubeflow", 1, 3, 0, 1, Meeting::Address},
      {kSageMaker, "SageMaker", 1, 3, 0, 1, Meeting::Address},
      {kTfJob, "TF_CONFIG", 2, 3, {}, {}, Meeting::Address},
      {kJsrun, "LSF (jsrun)", 5, 8, 1, 4, Meeting::Launcher},
      {{{"PMIX_NAMESPACE", "prterun-a-1@1"}, {"PMIX_RANK", "3"}, {"pmix.job.size", "4"}, {"pmix.local.size", "4"}},
       "PMIx",
       3,
       4,
       {},
       4,
       Meeting::Launcher},
      {{{"LWS_LEADER_ADDRESS", "lws-0.lws.ns"}, {"LWS_GROUP_SIZE", "3"}, {"LWS_WORKER_INDEX", "2"}},
       "LeaderWorkerSet",
       2,
       3,
       0,
       1,
       Meeting::Address},
      {{{"JAX_COORDINATOR_ADDRESS", "job-node-0-0.job:6666"}, {"JAX_NUM_PROCESSES", "2"}, {"JAX_PROCESS_ID", "1"}},
       "Kubeflow (JAX)",
       1,
       2,
       0,
       1,
       Meeting::Address},
      {{{"COORDINATOR_ADDRESS", "job-0"}, {"COORDINATOR_PORT", "6666"}, {"NUM_PROCESSES", "2"}, {"PROCESS_ID", "0"}},
       "JAXJob",
       0,
       2,
       0,
       1,
       Meeting::Address},
      {{{"JOB_COMPLETION_INDEX", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "job-0.job"}, {"MASTER_PORT", "29500"}},
       "Indexed Job",
       1,
       4,
       0,
       1,
       Meeting::Master},
      {kVolcano, "Volcano", 1, 2, 0, 1, Meeting::Address},
      {{{"MV2_COMM_WORLD_RANK", "0"},
        {"MV2_COMM_WORLD_SIZE", "2"},
        {"MV2_COMM_WORLD_LOCAL_RANK", "0"},
        {"MV2_COMM_WORLD_LOCAL_SIZE", "1"}},
       "MVAPICH2",
       0,
       2,
       0,
       1,
       Meeting::Launcher},
  };
  for (const GoodLaunch& one : cases) {
    const auto detected = detect(one.environment);
    ASSERT_TRUE(detected) << one.launcher << ": " << detected.error().what();
    EXPECT_EQ(detected->launcher, one.launcher);
    EXPECT_EQ(detected->rank, one.rank) << one.launcher;
    EXPECT_EQ(detected->size, one.size) << one.launcher;
    EXPECT_EQ(detected->local_rank, one.local_rank) << one.launcher;
    EXPECT_EQ(detected->local_size, one.local_size) << one.launcher;
    EXPECT_EQ(detected->meeting, one.meeting) << one.launcher;
    EXPECT_FALSE(detected->source.empty());
    EXPECT_EQ(detected->warning, one.environment.contains("SM_NUM_GPUS") ? LaunchWarning::Gpus : LaunchWarning::None)
        << detected->note;
  }
}

TEST(Launchers, TheInnermostWins) {
  const struct {
    Environment environment;
    std::string launcher;
  } cases[] = {
      {with(kSlurm, kOpenMpi), "Open MPI"},
      {with(kSlurm, kHydra), "MPI (PMI)"},
      {with(kSlurm, kTorchrun), "torchrun"},
      {with(kOpenMpi, kTorchrun), "torchrun"},
      {with(kPod, kTorchrun), "torchrun"},
      {with(kPod, kOpenMpi), "Open MPI"},
      {with(kPod, kHorovod), "Horovod"},
      {with(kSageMaker, kOpenMpi), "Open MPI"},
      {with(kSageMaker, kTorchrun), "torchrun"},
      {with(kTfJob, kSlurm), "Slurm"},
      {with(kSageMaker, kTfJob), "TF_CONFIG"},
      {with(kOpenMpi, {{"K_MPI_JOB_ROLE", "launcher"}}), "Open MPI"},
      {with(kOpenMpi, {{"RANK", "0"}, {"WORLD_SIZE", "2"}}), "env://"},
      {with(kSlurm, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"COHORT_STORE", "127.0.0.1:1"}}), "cohort run"},
      // A program under horovodrun sets env://'s variables from Horovod's.
      {with(kHorovod, {{"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "a"}}), "env://"},
      {with(kHorovod, {{"RANK", "3"}, {"WORLD_SIZE", "4"}}), "Horovod"},
      // They only repeat the launcher, with a place to meet or without.
      {with(kOpenMpi, {{"RANK", "1"}, {"WORLD_SIZE", "4"}}), "Open MPI"},
      {with(kSlurm, {{"RANK", "4"}, {"WORLD_SIZE", "6"}, {"LOCAL_RANK", "0"}}), "Slurm"},
      {with(kSlurm, {{"RANK", "4"}, {"WORLD_SIZE", "6"}, {"MASTER_ADDR", "n08"}}), "Slurm"},
      {with(kSlurm, {{"RANK", "5"}, {"WORLD_SIZE", "6"}, {"MASTER_ADDR", "n08"}}), "env://"},
      // A pod's RANK, changed by somebody, is somebody's.
      {with(kPod, {{"RANK", "2"}}), "env://"},
      // srun sets PMI's variables for its tasks.
      {with(kSlurm, {{"PMI_RANK", "4"}, {"PMI_SIZE", "6"}, {"PMI_FD", "3"}}), "Slurm"},
  };
  for (const auto& one : cases) {
    const auto detected = detect(one.environment);
    ASSERT_TRUE(detected) << one.launcher << ": " << detected.error().what();
    EXPECT_EQ(detected->launcher, one.launcher);
  }
}

TEST(Launchers, PodsMeetAtTheFirst) {
  const struct {
    Environment environment;
    net::Address address;
  } cases[] = {
      {{{"LWS_LEADER_ADDRESS", "lws-0.lws"}, {"LWS_GROUP_SIZE", "2"}, {"LWS_WORKER_INDEX", "0"}}, {"lws-0.lws", 29500}},
      {{{"LWS_LEADER_ADDRESS", "l"}, {"LWS_GROUP_SIZE", "2"}, {"LWS_WORKER_INDEX", "0"}, {"MASTER_PORT", "7"}},
       {"l", 7}},
      {{{"JAX_COORDINATOR_ADDRESS", "a:6"}, {"JAX_NUM_PROCESSES", "2"}, {"JAX_PROCESS_ID", "1"}}, {"a", 6}},
      {{{"JAX_COORDINATOR_ADDRESS", "a"},
        {"JAX_COORDINATOR_PORT", "6"},
        {"JAX_NUM_PROCESSES", "2"},
        {"JAX_PROCESS_ID", "1"}},
       {"a", 6}},
      {{{"COORDINATOR_ADDRESS", "b"}, {"COORDINATOR_PORT", "6"}, {"NUM_PROCESSES", "2"}, {"PROCESS_ID", "0"}},
       {"b", 6}},
      {kVolcano, {"j-worker-0.j", 29500}},
      {with(kSageMaker, {{"SM_MASTER_PORT", "7777"}, {"SM_HOST_COUNT", "3"}, {"SM_CURRENT_HOST_RANK", "1"}}),
       {"algo-1", 7777}},
  };
  for (const auto& one : cases) {
    const auto detected = detect(one.environment);
    ASSERT_TRUE(detected) << one.address.host << ": " << detected.error().what();
    EXPECT_EQ(detected->address, one.address) << detected->launcher;
  }
  // A number of one's own counts for more than the control plane's.
  EXPECT_EQ(detect({{"JOB_COMPLETION_INDEX", "1"}, {"RANK", "3"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "a"}})->rank, 3);
}

TEST(Launchers, PodsThatContradictThemselvesAreRefused) {
  const struct {
    Environment environment;
    std::string text;
  } cases[] = {
      {{{"LWS_LEADER_ADDRESS", "a"}, {"LWS_GROUP_SIZE", "2"}, {"LWS_WORKER_INDEX", "2"}}, "LWS_WORKER_INDEX=2"},
      {{{"LWS_LEADER_ADDRESS", "a"}, {"LWS_GROUP_SIZE", "2"}, {"LWS_WORKER_INDEX", "0"}, {"MASTER_PORT", "x"}},
       "MASTER_PORT='x'"},
      {{{"JAX_COORDINATOR_ADDRESS", "a:"}, {"JAX_NUM_PROCESSES", "2"}, {"JAX_PROCESS_ID", "1"}}, "is not HOST:PORT"},
      {with(kVolcano, {{"VC_WORKER_NUM", "3"}}), "VC_WORKER_NUM=3 but VC_WORKER_HOSTS names 2 hosts"},
      {with(kVolcano, {{"VC_TASK_INDEX", "2"}}), "tasks count from 0"},
      {with(kVolcano, {{"VC_PS_HOSTS", "j-ps-0.j"}}), "VC_PS_HOSTS, VC_WORKER_HOSTS"},
      {with(kSageMaker, {{"SM_HOST_COUNT", "2"}}), "SM_HOST_COUNT=2 but"},
      {with(kSageMaker, {{"SM_CURRENT_HOST_RANK", "2"}}), "SM_CURRENT_HOST_RANK=2 but"},
  };
  for (const auto& one : cases) {
    const auto detected = detect(one.environment);
    ASSERT_FALSE(detected) << one.text;
    EXPECT_EQ(detected.error().code(), ErrorCode::InvalidArgument);
    EXPECT_CONTAINS(detected.error().what(), one.text);
  }
}

TEST(Launchers, SlurmSaysWhichNodes) {
  auto detected = detect(kSlurm);
  ASSERT_TRUE(detected) << detected.error().what();
  EXPECT_EQ(detected->node_rank, 1);
  EXPECT_EQ(detected->nodes, 4);
  EXPECT_EQ(detected->hosts, (Names{"n08", "n09", "n10", "n11"}));
  EXPECT_CONTAINS(detected->job, "SLURM_JOB_ID=17");
  EXPECT_CONTAINS(detected->job, "SLURM_STEP_ID=0");
  // Without task counts per node, one node has all tasks.
  const Environment one = {{"SLURM_JOB_ID", "1"},         {"SLURM_STEP_ID", "3"},        {"SLURM_PROCID", "1"},
                           {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NUM_NODES", "1"}, {"SLURM_LOCALID", "1"}};
  detected = detect(one);
  ASSERT_TRUE(detected) << detected.error().what();
  EXPECT_EQ(detected->local_size, 2);
  // A list that only the controller understands costs the names, no more.
  detected = detect(with(one, {{"SLURM_STEP_NODELIST", "block{b1}"}}));
  ASSERT_TRUE(detected);
  EXPECT_TRUE(detected->hosts.empty());
}

TEST(Launchers, ABatchScriptIsNoTask) {
  const Environment script = {{"SLURM_JOB_ID", "17"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}};
  // The shell of salloc runs in a step of its own, numbered from the top.
  for (const Environment& environment :
       {script, with(script, {{"SLURM_STEP_ID", "4294967290"}, {"SLURM_STEP_NUM_TASKS", "1"}}),
        with(script, {{"SLURM_STEP_ID", "4294967291"}, {"SLURM_STEP_NUM_TASKS", "8"}})}) {
    const auto detected = detect(environment);
    ASSERT_TRUE(detected) << detected.error().what();
    EXPECT_EQ(detected->launcher, "");
    EXPECT_EQ(detected->size, 1);
    EXPECT_CONTAINS(detected->note, "Slurm job 17 of 8 tasks");
  }
  EXPECT_EQ(detect(with(script, {{"SLURM_NTASKS", "1"}}))->note, "");
  EXPECT_CONTAINS(detect(with(script, {{"SLURM_NTASKS", "1"}, {"SLURM_HET_SIZE", "2"}}))->note,
                  "Slurm job 17 of 2 components");
  EXPECT_EQ(detect(with(script, {{"COHORT_ALONE", "1"}}))->note, "");
  const auto lsf = detect({{"LSB_JOBID", "5"}, {"LSB_DJOB_NUMPROC", "4"}});
  ASSERT_TRUE(lsf);
  EXPECT_CONTAINS(lsf->note, "LSF job 5 of 4 tasks");
  EXPECT_EQ(lsf->warning, LaunchWarning::Script);
  // A job of two nodes whose number of tasks nobody has said.
  EXPECT_CONTAINS(detect({{"SLURM_JOB_ID", "17"}, {"SLURM_JOB_NUM_NODES", "2"}})->note, "Slurm job 17 of 2 nodes");
}

TEST(Launchers, OneProcessForSeveralGpusIsTold) {
  const auto note = [](const Environment& environment) {
    const auto detected = detect(environment);
    EXPECT_TRUE(detected) << detected.error().what();
    EXPECT_EQ(detected->warning, detected->note.empty() ? LaunchWarning::None : LaunchWarning::Gpus) << detected->note;
    return detected->note;
  };
  for (const Environment& several : {Environment{{"SM_NUM_GPUS", "4"}}, Environment{{"SLURM_GPUS_ON_NODE", "4"}},
                                     Environment{{"CUDA_VISIBLE_DEVICES", "0,1,GPU-5,3"}}}) {
    const std::string& name = several.begin()->first;
    EXPECT_CONTAINS(note(several), name + "=");
    EXPECT_CONTAINS(note(several), "start one process for each, as by `cohort run -np 4`");
    EXPECT_CONTAINS(note(several), "COHORT_ALONE=1");
    EXPECT_EQ(note(with(several, {{"COHORT_ALONE", "1"}})), "");
    // One rank on each of two hosts, and two on one.
    const Environment pair = {{"OMPI_COMM_WORLD_SIZE", "2"}, {"OMPI_COMM_WORLD_RANK", "0"}};
    EXPECT_CONTAINS(note(with(several, with(pair, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}}))), name);
    EXPECT_EQ(note(with(several, with(pair, {{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}))), "");
    EXPECT_EQ(note(with(several, pair)), "");  // nothing says how many are here
  }
  for (const char* one : {"0", "GPU-5", "-1", "0,-1,2", "NoDevFiles"})
    EXPECT_EQ(note({{"CUDA_VISIBLE_DEVICES", one}, {"SM_NUM_GPUS", "4"}}), "") << one;  // it has chosen
  EXPECT_EQ(note({{"CUDA_VISIBLE_DEVICES", ""}, {"SM_NUM_GPUS", "4"}}), "");
  for (const auto& [list, devices] : std::map<std::string, int>{{"0", 1},
                                                                {"1, 0", 2},
                                                                {"GPU-5,MIG-1/2/3,3", 3},
                                                                {"0,-1,2", 1},
                                                                {"0,,1", 1},
                                                                {",0", 0},
                                                                {"", 0},
                                                                {" ", 0},
                                                                {"-1", 0},
                                                                {"NoDevFiles", 0},
                                                                {"none", 0},
                                                                {"void", 0},
                                                                {"0,none", 1}})
    EXPECT_EQ(devices_named(list), devices) << list;
  EXPECT_EQ(note({{"SM_NUM_GPUS", "0"}}), "");
  EXPECT_EQ(note({{"SM_NUM_GPUS", "1"}}), "");
}

TEST(Launchers, AWorldOnEachHostOfAJobIsTold) {
  // torchrun without --nnodes, as the task of a step on each of two nodes.
  const Environment torchrun = {{"TORCHELASTIC_RUN_ID", "none"},
                                {"RANK", "0"},
                                {"WORLD_SIZE", "4"},
                                {"LOCAL_RANK", "0"},
                                {"LOCAL_WORLD_SIZE", "4"},
                                {"MASTER_ADDR", "localhost"},
                                {"MASTER_PORT", "1"}};
  const Environment step = {{"SLURM_STEP_ID", "0"},        {"SLURM_PROCID", "1"},         {"SLURM_NODEID", "1"},
                            {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_LOCALID", "0"}};
  const auto told = detect(with(torchrun, step));
  ASSERT_TRUE(told) << told.error().what();
  EXPECT_EQ(told->warning, LaunchWarning::Hosts);
  EXPECT_CONTAINS(told->note, "all 4 ranks of this world are on this host");
  EXPECT_CONTAINS(told->note, "one of 2 hosts of a job (SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2 (Slurm))");
  const auto again = detect(with(torchrun, {{"SM_CURRENT_HOST", "algo-1"}, {"SM_HOSTS", R"(["algo-1","algo-2"])"}}));
  ASSERT_TRUE(again) << again.error().what();
  EXPECT_EQ(again->warning, LaunchWarning::Hosts);
  // Only a host's first rank warns; a world over both hosts is no reason to warn, nor one that `cohort run` has made.
  Environment second = with(torchrun, step);
  second["RANK"] = second["LOCAL_RANK"] = "1";
  EXPECT_EQ(detect(second)->warning, LaunchWarning::None);
  Environment both = with(torchrun, step);
  both["WORLD_SIZE"] = "8";
  EXPECT_EQ(detect(both)->warning, LaunchWarning::None);
  Environment ours = with(torchrun, with(step, {{"COHORT_STORE", "h:1"}, {"COHORT_JOB_ID", "none"}}));
  EXPECT_EQ(detect(ours)->warning, LaunchWarning::None) << detect(ours)->note;
}

// Each node's task starts two ranks on its node, and some of their numbers equal the task's own by chance.
TEST(Launchers, RanksByHandAtLoopbackAreNotTheTasksOfSeveralNodes) {
  for (const char* const node : {"0", "1"}) {
    const Environment step = {{"SLURM_STEP_ID", "0"},        {"SLURM_PROCID", node},        {"SLURM_NODEID", node},
                              {"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_NUM_NODES", "2"}, {"SLURM_LOCALID", "0"}};
    for (const char* const rank : {"0", "1"}) {
      Environment mine = with(step, {{"RANK", rank}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", rank}, {"MASTER_PORT", "1"}});
      mine["MASTER_ADDR"] = "localhost";
      const auto by_hand = detect(mine);
      ASSERT_TRUE(by_hand) << by_hand.error().what();
      EXPECT_EQ(by_hand->launcher, "env://");
      EXPECT_EQ(by_hand->warning, std::string(rank) == "0" ? LaunchWarning::Hosts : LaunchWarning::None);
      mine["MASTER_ADDR"] = "h1";
      mine["RANK"] = node;
      EXPECT_EQ(detect(mine)->launcher, "Slurm") << "they repeat what Slurm says";
    }
  }
  const auto sagemaker = detect({{"RANK", "0"},
                                 {"WORLD_SIZE", "2"},
                                 {"MASTER_ADDR", "127.0.0.1"},
                                 {"MASTER_PORT", "1"},
                                 {"SM_CURRENT_HOST", "algo-1"},
                                 {"SM_HOSTS", R"(["algo-1","algo-2"])"}});
  ASSERT_TRUE(sagemaker) << sagemaker.error().what();
  EXPECT_CONTAINS(sagemaker->note, "all 2 ranks of this world are on this host");
}

TEST(Launchers, PmixIsAskedOnlyWhereNobodyElseSaysIt) {
  const Environment prterun = {{"PMIX_NAMESPACE", "prterun-a-1@1"}, {"PMIX_RANK", "3"}};
  EXPECT_TRUE(needs_pmix_keys(prterun));
  EXPECT_TRUE(needs_pmix_keys(with(kSlurm, prterun)));
  EXPECT_FALSE(needs_pmix_keys(with(prterun, {{"pmix.job.size", "4"}})));
  EXPECT_FALSE(needs_pmix_keys(kOpenMpi));
  EXPECT_FALSE(needs_pmix_keys(with(kTorchrun, prterun)));
  EXPECT_FALSE(needs_pmix_keys({}));
  // srun --mpi=pmix
  const Environment task = with(kSlurm, {{"PMIX_NAMESPACE", "slurm.pmix.17.0"}, {"PMIX_RANK", "4"}});
  EXPECT_FALSE(needs_pmix_keys(task));
  EXPECT_EQ(detect(task)->launcher, "Slurm");
  EXPECT_FALSE(detect(prterun));  // never a world of one
}

TEST(Launchers, OpenMpiNamesItsJob) {
  const auto detected = detect(kOpenMpi);
  ASSERT_TRUE(detected);
  EXPECT_CONTAINS(detected->job, "1001127937");
  EXPECT_EQ(detected->job.find("PMIX_RANK"), std::string::npos);
  EXPECT_NE(detected->job, detect(with(kOpenMpi, {{"PMIX_NAMESPACE", "1001127938"}}))->job);
  EXPECT_EQ(detect(kHydra)->job, "");  // Hydra's variables do not distinguish its jobs
}

TEST(Launchers, TfConfigLeadsToTheChief) {
  const auto worker = detect(kTfJob);
  ASSERT_TRUE(worker);
  EXPECT_EQ(worker->address, (net::Address{"j-chief-0.ns.svc", 2222}));
  EXPECT_EQ(worker->hosts.size(), 3U);
  const std::string local =
      R"({"cluster":{"worker":["localhost:1","localhost:2"]},"task":{"type":"worker","index":1}})";
  const auto on_one = detect({{"TF_CONFIG", local}});
  ASSERT_TRUE(on_one);
  EXPECT_EQ(on_one->local_size, 2);
  EXPECT_EQ(on_one->local_rank, 1);
  const auto evaluator =
      detect({{"TF_CONFIG", R"({"cluster":{"worker":["a:1","b:1"]},"task":{"type":"evaluator","index":0}})"}});
  ASSERT_TRUE(evaluator) << evaluator.error().what();
  EXPECT_EQ(evaluator->size, 1);
  EXPECT_EQ(evaluator->meeting, Meeting::None);
  EXPECT_EQ(detect({{"TF_CONFIG", "{}"}})->size, 1);
}

TEST(Launchers, SayWhatAProcessIsFor) {
  struct Case {
    Environment environment;
    Role role;
    std::optional<int> number;
    int workers, servers;
  };
  const std::string cluster = R"({"cluster":{"chief":["a:1"],"worker":["b:1"],"ps":["c:1","d:1"]},"task":{"type":")";
  const auto task = [&](const char* type, int index) {
    return Environment{{"TF_CONFIG", fmt::format(R"({}{}","index":{}}}}})", cluster, type, index)}};
  };
  const Environment job = {{"COHORT_STORE", "a:1"},     {"COHORT_WORKERS", "4"}, {"COHORT_SERVERS", "2"},
                           {"COHORT_ROLE_NUMBER", "1"}, {"COHORT_JOB_ID", "j"},  {"COHORT_ROLE", "server"}};
  const Environment rank = with(job, {{"COHORT_ROLE", "worker"}, {"RANK", "1"}, {"WORLD_SIZE", "4"}});
  const Environment dmlc = {{"DMLC_ROLE", "server"}, {"DMLC_NUM_WORKER", "2"}, {"DMLC_NUM_SERVER", "3"}};
  const Case cases[] = {
      {{}, Role::Worker, 0, 1, 0},
      {kSlurm, Role::Worker, 4, 6, 0},
      {task("chief", 0), Role::Worker, 0, 2, 2},
      {task("worker", 0), Role::Worker, 1, 2, 2},
      {task("ps", 1), Role::Server, 1, 2, 2},
      {task("evaluator", 0), Role::Evaluator, 0, 2, 2},
      {{{"TF_CONFIG", R"({"task":{"type":"evaluator","index":0}})"}}, Role::Evaluator, 0, 0, 0},
      {rank, Role::Worker, 1, 4, 2},
      {job, Role::Server, 1, 4, 2},
      {with(job, {{"COHORT_ROLE", "evaluator"}, {"COHORT_ROLE_NUMBER", "0"}}), Role::Evaluator, 0, 4, 2},
      // A server of a job that Slurm's step has started: its tasks are not its own.
      {with(kSlurm, job), Role::Server, 1, 4, 2},
      {dmlc, Role::Server, {}, 2, 3},
      {with(dmlc, {{"DMLC_SERVER_ID", "2"}}), Role::Server, 2, 2, 3},
      {with(dmlc,
            {{"DMLC_ROLE", "worker"}, {"DMLC_RANK", "1"}, {"DMLC_PS_ROOT_URI", "a"}, {"DMLC_PS_ROOT_PORT", "9000"}}),
       Role::Worker, 1, 2, 3},
  };
  for (const Case& one : cases) {
    const auto detected = detect(one.environment);
    ASSERT_TRUE(detected) << detected.error().what();
    EXPECT_EQ(detected->role, one.role) << detected->source;
    EXPECT_EQ(detected->number, one.number) << detected->source;
    EXPECT_EQ(detected->workers, one.workers) << detected->source;
    EXPECT_EQ(detected->servers, one.servers) << detected->source;
    const auto as_rank = detect_rank(one.environment);
    EXPECT_EQ(as_rank.has_value(), one.role != Role::Server);
    if (as_rank) continue;
    EXPECT_CONTAINS(as_rank.error().what(), "a parameter server is no rank and forms no world");
  }
}

TEST(Launchers, SageMakerCountsHosts) {
  const auto detected = detect(kSageMaker);
  ASSERT_TRUE(detected);
  EXPECT_EQ(detected->address, (net::Address{"algo-1", 29500}));
  EXPECT_EQ(detected->hosts, (Names{"algo-1", "algo-10", "algo-2"}));
  const std::string config = R"({"current_host":"algo-2","hosts":["algo-1","algo-2"],"instance_groups":[)"
                             R"({"instance_group_name":"g","instance_type":"t","hosts":["algo-1"]}]})";
  const Environment by_config = {{"SM_CURRENT_HOST", "algo-2"}, {"SM_RESOURCE_CONFIG", config}};
  EXPECT_EQ(detect(by_config)->rank, 1);
  // This host's group does not train, so the host is meant to be alone.
  const auto apart = detect(with(by_config, {{"SM_DISTRIBUTION_INSTANCE_GROUPS", R"(["g"])"}}));
  ASSERT_TRUE(apart) << apart.error().what();
  EXPECT_EQ(apart->size, 1);
  EXPECT_EQ(detect({{"SM_CURRENT_HOST", "algo-1"}, {"SM_HOSTS", R"(["algo-1"])"}})->size, 1);
}

TEST(Launchers, APodIsNoProcess) {
  // The second version of the operator sets only options of torchrun.
  const auto second = detect({{"PET_NNODES", "2"},
                              {"PET_NODE_RANK", "1"},
                              {"PET_NPROC_PER_NODE", "auto"},
                              {"PET_MASTER_ADDR", "job-node-0-0.job"},
                              {"PET_MASTER_PORT", "29501"}});
  ASSERT_TRUE(second) << second.error().what();
  EXPECT_EQ(second->rank, 1);
  EXPECT_EQ(second->size, 2);
  EXPECT_EQ(second->address, (net::Address{"job-node-0-0.job", 29501}));
  EXPECT_EQ(detect({{"PET_NNODES", "1"}, {"PET_NODE_RANK", "0"}})->size, 1);
}

TEST(Launchers, RefuseContradictionsNamingBothSides) {
  const struct {
    Environment environment;
    const char* first;
    const char* second;
  } cases[] = {
      {with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "3,1(x2)"}}), "SLURM_STEP_TASKS_PER_NODE=3,1(x2)",
       "SLURM_STEP_NUM_TASKS=6"},
      {with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "3,3"}}), "SLURM_STEP_TASKS_PER_NODE=3,3", "SLURM_STEP_NUM_NODES=4"},
      {with(kSlurm, {{"SLURM_STEP_TASKS_PER_NODE", "x"}}), "SLURM_STEP_TASKS_PER_NODE", "character 1"},
      {with(kSlurm, {{"SLURM_STEP_NODELIST", "n[1-3]"}}), "SLURM_STEP_NODELIST=n[1-3]", "SLURM_STEP_NUM_NODES=4"},
      {with(kSlurm, {{"SLURM_NODEID", "4"}}), "SLURM_NODEID=4", "SLURM_STEP_NUM_NODES=4"},
      {with(kSlurm, {{"SLURM_LOCALID", "1"}}), "SLURM_LOCALID=1", "its local size=1"},
      {with(kSlurm, {{"SLURM_PROCID", "6"}}), "SLURM_PROCID=6", "SLURM_STEP_NUM_TASKS=6"},
      {with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "4"}}), "OMPI_COMM_WORLD_RANK=4", "OMPI_COMM_WORLD_SIZE=4"},
      {with(kHydra, {{"MPI_LOCALNRANKS", "5"}}), "MPI_LOCALNRANKS=5", "PMI_SIZE=4"},
      {with(kHorovod, {{"HOROVOD_LOCAL_RANK", "2"}}), "HOROVOD_LOCAL_RANK=2", "HOROVOD_LOCAL_SIZE=2"},
      {{{"PMI_ID", "0"}, {"PMI_PORT", "a:1"}}, "PMI_PORT=a:1", "PMI_SIZE"},
      {with(kPod, {{"WORLD_SIZE", "4"}}), "WORLD_SIZE=4", "PET_NNODES=3"},
      {with(kPod, {{"PET_NPROC_PER_NODE", "2"}, {"WORLD_SIZE", "6"}}), "PET_NPROC_PER_NODE=2", "not a rank"},
      {with(kPod, {{"PET_MASTER_ADDR", "other"}}), "MASTER_ADDR=job-master-0", "PET_MASTER_ADDR=other"},
      {with(kPod, {{"RANK", "3"}, {"PET_NODE_RANK", "3"}}), "PET_NODE_RANK=3", "PET_NNODES=3"},
      {with(kPod, {{"MASTER_ADDR", ""}, {"PET_MASTER_ADDR", ""}}), "PET_NODE_RANK=1", "PET_MASTER_ADDR"},
      {with(kPod, {{"MASTER_PORT", "0"}, {"PET_MASTER_PORT", ""}}), "MASTER_PORT='0'", "port"},
      {{{"PET_NNODES", "1:3"}, {"PET_RDZV_ENDPOINT", "w:1"}}, "PET_NNODES=1:3", "torchrun"},
      {{{"PET_NNODES", "3:1"}, {"PET_RDZV_ENDPOINT", "w:1"}}, "PET_NNODES='3:1'", "MIN:MAX"},
      {{{"K_MPI_JOB_ROLE", "launcher"}}, "K_MPI_JOB_ROLE=launcher", "mpirun"},
      {with(kSageMaker, {{"SM_CURRENT_HOST", "algo-4"}}), "algo-4", "not among them"},
      {with(kSageMaker, {{"SM_RESOURCE_CONFIG", R"({"current_host":"algo-1","hosts":["algo-1"]})"}}),
       "SM_CURRENT_HOST=algo-10", "algo-1"},
      {with(kSageMaker, {{"SM_RESOURCE_CONFIG", R"({"current_host":"algo-10","hosts":["algo-10"]})"}}), "SM_HOSTS",
       "other hosts"},
      {{{"DMLC_ROLE", "scheduler"}, {"DMLC_NUM_WORKER", "2"}}, "DMLC_ROLE=scheduler", "do not start this process"},
      {{{"DMLC_ROLE", "chief"}, {"DMLC_NUM_WORKER", "2"}}, "DMLC_ROLE='chief'", "worker, server, scheduler"},
      {{{"DMLC_ROLE", "worker"}, {"DMLC_NUM_WORKER", "2"}}, "DMLC_NUM_WORKER=2", "DMLC_WORKER_ID"},
      {{{"DMLC_ROLE", "worker"}, {"DMLC_NUM_WORKER", "2"}, {"DMLC_WORKER_ID", "2"}},
       "DMLC_WORKER_ID=2",
       "DMLC_NUM_WORKER=2"},
      {{{"DMLC_ROLE", "worker"}, {"DMLC_NUM_WORKER", "2"}, {"DMLC_WORKER_ID", "1"}},
       "DMLC_WORKER_ID=1",
       "DMLC_PS_ROOT_URI"},
      {{{"COHORT_STORE", "a:1"}, {"COHORT_ROLE", "ps"}}, "COHORT_ROLE='ps'", "worker or server or evaluator"},
      {{{"COHORT_STORE", "a:1"}, {"COHORT_ROLE", "server"}, {"COHORT_ROLE_NUMBER", "2"}, {"COHORT_SERVERS", "2"}},
       "COHORT_ROLE_NUMBER=2",
       "COHORT_SERVERS=2"},
      {{{"TF_CONFIG", R"({"cluster":{"worker":["a:0","b:1"]},"task":{"type":"worker","index":0}})"}},
       "TF_CONFIG",
       "port"},
      // A world of one under a launcher with several processes.
      {with(kOpenMpi, {{"RANK", "0"}, {"WORLD_SIZE", "1"}}), "WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=4"},
      {with(kTfJob, {{"RANK", "0"}, {"WORLD_SIZE", "1"}}), "WORLD_SIZE=1", "TF_CONFIG"},
      {with(kSageMaker, {{"RANK", "0"}, {"WORLD_SIZE", "1"}}), "WORLD_SIZE=1", "3 processes"},
  };
  for (const auto& one : cases) {
    const auto detected = detect(one.environment);
    ASSERT_FALSE(detected) << one.first;
    EXPECT_EQ(detected.error().code(), ErrorCode::InvalidArgument);
    EXPECT_CONTAINS(detected.error().what(), one.first);
    EXPECT_CONTAINS(detected.error().what(), one.second);
    Environment alone = one.environment;
    alone["COHORT_ALONE"] = "1";
    EXPECT_TRUE(detect(alone));
  }
}

TEST(Launchers, HaveNamesOfTheirOwn) {
  std::set<std::string_view> names;
  for (const Launcher& row : launchers()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_FALSE(row.markers[0].empty()) << row.name;
    EXPECT_TRUE(row.read != nullptr || (!row.rank.empty() && !row.size.empty())) << row.name;
  }
}

TEST(Launchers, AreDocumentedAsTheyAre) {
  std::ifstream file(std::string(COHORT_DOCS) + "/reference/launchers.md");
  ASSERT_TRUE(file);
  std::vector<std::string> rows;
  bool within = false;
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("| launcher | known by", 0) == 0) within = true;
    if (line.empty()) within = false;
    if (within && line.rfind("|---", 0) != 0) rows.push_back(line);
  }
  ASSERT_EQ(rows.size(), launchers().size() + 1) << "a row for each launcher";
  std::size_t number = 0;
  for (const Launcher& row : launchers()) {
    const std::string& line = rows[++number];
    EXPECT_EQ(line.rfind(fmt::format("| {} |", row.name), 0), 0U) << line << ": in the order of the table";
    for (const std::string_view name :
         {row.markers[0], row.markers[1], row.rank, row.size, row.local_rank, row.local_size}) {
      if (name.empty()) continue;
      EXPECT_NE(line.find(fmt::format("`{}`", name)), std::string::npos) << name << " in " << line;
    }
  }
}

RC_GTEST_PROP(Launchers, WhateverIsSetARankIsWithinItsWorld, ()) {
  std::vector<std::string> names = {
      "PMI_FD",         "SLURM_NODEID",     "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE",
      "PET_NODE_RANK",  "PET_MASTER_ADDR",  "MASTER_PORT",          "SM_HOSTS",
      "DMLC_WORKER_ID", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"};
  for (const Launcher& row : launchers()) {
    for (const std::string_view name :
         {row.markers[0], row.markers[1], row.rank, row.size, row.local_rank, row.local_size})
      if (!name.empty()) names.emplace_back(name);
  }
  const auto environment = *rc::gen::container<Environment>(
      rc::gen::elementOf(names),
      rc::gen::element<std::string>("", "0", "1", "2", "3", "-1", "x", "2,1", "{}", "a", "worker", "server"));
  const auto detected = detect(environment);
  if (!detected) {
    RC_ASSERT(detected.error().code() == ErrorCode::InvalidArgument);
    return;
  }
  RC_ASSERT(detected->rank >= 0 && detected->rank < detected->size);
  if (detected->role != Role::Worker) {  // it is in no world, whatever else is set
    RC_ASSERT(detected->size == 1);
    return;
  }
  RC_ASSERT(!detected->local_rank || !detected->local_size || *detected->local_rank < *detected->local_size);
  RC_ASSERT(detected->size == 1 || detected->meeting != Meeting::None);
  if (detected->size == 1 && !detected->alone) {
    for (const SizeClaim& claim : size_claims(environment)) RC_ASSERT(claim.size <= 1);
  }
}

}  // namespace
}  // namespace cohort::rendezvous
