// Options of other launchers, for those who type them by habit: what does the same here.
#include "commands.h"

#include <algorithm>
#include <cctype>

namespace cohort::app {
namespace {

struct Foreign {
  std::string_view name;  ///< with - for _
  std::string_view whose;
  std::string_view here;
};

constexpr Foreign kForeign[] = {
    {"--rdzv-conf", "torchrun", "leave it out: --start-timeout SECONDS is how long launchers wait for each other"},
    {"--local-addr", "torchrun", "--network NAME or ADDRESS/BITS"},
    {"--role", "torchrun", "leave it out: all ranks run one program"},
    {"--monitor-interval", "torchrun", "leave it out: the end of a rank is seen at once"},
    {"--log-dir", "torchrun", "--output-dir DIR; logs are kept without it, too"},
    {"--redirects", "torchrun", "leave it out: each rank has its logs, and --ranks says which are shown"},
    {"--tee", "torchrun", "leave it out: each rank has its logs, and --ranks says which are shown"},
    {"--local-ranks-filter", "torchrun", "--ranks 0,3-5"},
    {"--num-proc", "horovodrun", "-np N"},
    {"--output-filename", "horovodrun", "--output-dir DIR"},
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
    {"-npernode", "mpirun", "--per-node N"},
    {"-ppn", "mpiexec", "--per-node N"},
    {"-genv", "mpiexec", "--env NAME=VALUE"},
    {"-machinefile", "mpirun", "--hostfile FILE"},
    {"--machinefile", "mpirun", "--hostfile FILE"},
    {"-hostfile", "mpirun", "--hostfile FILE"},
    {"--host", "mpirun", "-H HOST:N,..."},
    {"-host", "mpirun", "-H HOST:N,..."},
    {"--oversubscribe", "mpirun", "leave it out: there may be more ranks than cores"},
    {"--allow-run-as-root", "mpirun", "leave it out: root may start jobs"},
    {"--bind-to", "mpirun", "--bind core, or none"},
    {"-bind-to", "mpirun", "--bind core, or none"},
    {"--map-by", "mpirun", "leave it out: hosts are filled in the order of their list; --bind core shares out cores"},
    {"-map-by", "mpirun", "leave it out: hosts are filled in the order of their list; --bind core shares out cores"},
    {"--tag-output", "mpirun", "leave it out: lines have their rank in front (--prefix)"},
    {"--mca", "mpirun", "--env OMPI_MCA_NAME=VALUE; only COHORT_TRANSPORT=mpi uses MPI"},
    {"-mca", "mpirun", "--env OMPI_MCA_NAME=VALUE; only COHORT_TRANSPORT=mpi uses MPI"},
    {"--wdir", "mpirun", "leave it out: ranks start in the folder that this command is in"},
    {"-wdir", "mpirun", "leave it out: ranks start in the folder that this command is in"},
    {"--ntasks", "srun", "-np N"},
    {"--ntasks-per-node", "srun", "--per-node N"},
    {"--label", "srun", "leave it out: lines have their rank in front (--prefix)"},
    {"--num-processes", "accelerate launch", "-np N"},
    {"--num-machines", "accelerate launch", "-H a,b, or --nodes N of a list"},
    {"--num-cpu-threads-per-process", "accelerate launch", "--env OMP_NUM_THREADS=N"},
};

}  // namespace

std::string foreign_option(std::string_view word) {
  std::string name(word.substr(0, word.find('=')));
  std::replace(name.begin(), name.end(), '_', '-');
  for (const Foreign& foreign : kForeign) {
    if (foreign.name == name) return std::string(foreign.whose) + "'s; here: " + std::string(foreign.here);
  }
  return {};
}

}  // namespace cohort::app
